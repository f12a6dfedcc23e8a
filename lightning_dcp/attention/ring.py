"""Ring attention: keys and values travel around the CP group, each hop's transfer under the hop's compute.

After Liu et al., https://arxiv.org/abs/2310.01889, with the layouts of :mod:`lightning_dcp.parallel.layout`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_dcp.attention.exchange import start_hop
from lightning_dcp.attention.kernels import Kernel, Rows, choose_kernel
from lightning_dcp.attention.merge import merge_
from lightning_dcp.errors import UnsupportedAttentionError
from lightning_dcp.parallel.context import CPContext

_KEYS_AND_VALUES, _THEIR_GRADIENTS = 0, 1  # tags of the two kinds of transfer


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, context: CPContext, *, scale: float | None = None, kernel: Kernel | None = None
) -> Tensor:
    """Causal attention inside each sample of a pack whose tokens lie on the ranks of a CP group.

    Args:
        q: this rank's queries, ``[num_local_tokens, H, D]``.
        k: this rank's keys, ``[num_local_tokens, H_kv, D]``; H is a multiple of H_kv.
        v: this rank's values, like ``k``.
        context: group, layout and boundaries of the pack.
        scale: factor of the scores, 1/sqrt(D) by default.
        kernel: by default the one for the device and dtype.

    Returns:
        The outputs of this rank's queries, ``[num_local_tokens, H, D]``, of q's dtype.

    Raises:
        UnsupportedAttentionError: shapes that do not fit together or the context.
    """
    _check_shapes(q, k, v, context)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    return _RingAttention.apply(q, k, v, context, scale, kernel or choose_kernel(q))


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, context: CPContext) -> None:
    expected = context.num_local_tokens
    if not (q.shape[0] == k.shape[0] == v.shape[0] == expected):
        raise UnsupportedAttentionError(
            f"attention over {q.shape[0]} queries, {k.shape[0]} keys and {v.shape[0]} values; this rank holds {expected} "
            "tokens of the pack, and context-parallel attention is self-attention over exactly these"
        )
    if k.shape != v.shape or q.shape[-1] != k.shape[-1]:
        raise UnsupportedAttentionError(
            f"head sizes differ: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        )
    if q.shape[1] % k.shape[1]:
        raise UnsupportedAttentionError(f"{q.shape[1]} query heads are no multiple of {k.shape[1]} key heads")


class _RingAttention(torch.autograd.Function):
    """The ring as one differentiable step; partial results are merged in float32 or float64, never rounded between."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, context: CPContext, scale: float, kernel: Kernel) -> Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        out = torch.zeros(q.shape, dtype=wide, device=q.device)
        lse = torch.full(q.shape[:2], -math.inf, dtype=wide, device=q.device)
        holder, held = context.rank, [k, v]
        for hop in range(context.size):
            previous = (holder - 1) % context.size
            last = hop == context.size - 1
            transfer = None if last else start_hop(held, context.layout.tokens(previous), context, tag=_KEYS_AND_VALUES)
            for rows, part, part_lse in kernel.forward(q, held[0], held[1], context.blocks_to(holder), scale):
                _join(out, lse, rows, part, part_lse, first=hop == 0)
            if transfer is not None:
                held = transfer.wait()
            holder = previous
        result = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, result, lse)
        ctx.context, ctx.scale, ctx.kernel = context, scale, kernel
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
        # Attention modes that are on for the sake of checkpointing need not see each small operation in here.
        with torch._C.DisableTorchFunction():
            return (*_RingAttention._gradients(ctx, *grads), None, None, None)

    @staticmethod
    def _gradients(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, out, lse = ctx.saved_tensors
        context: CPContext = ctx.context
        wide = lse.dtype
        grad = grads[0].to(q.dtype)
        dq = torch.zeros(q.shape, dtype=wide, device=q.device)
        holder, held = context.rank, [k, v]
        incoming = None
        for hop in range(context.size):
            previous = (holder - 1) % context.size
            tokens = context.layout.tokens(previous)
            last = hop == context.size - 1
            transfer = None if last else start_hop(held, tokens, context, tag=_KEYS_AND_VALUES)
            held_grads = [torch.zeros(t.shape, dtype=wide, device=t.device) for t in held]
            parts = ctx.kernel.backward(grad, q, *held, out, lse, context.blocks_to(holder), ctx.scale)
            _add_gradients(dq, held_grads[0], held_grads[1], parts)
            # The gradients of the keys held now were begun by the ranks that held them before; they arrive while this
            # hop computes, get this rank's part, and travel on. After c hops they are home.
            if incoming is not None:
                held_grads = [own + other for own, other in zip(held_grads, incoming.wait(), strict=True)]
            if context.size > 1:
                incoming = start_hop(held_grads, tokens, context, tag=_THEIR_GRADIENTS)
            if transfer is not None:
                held = transfer.wait()
            holder = previous
        dk, dv = held_grads if incoming is None else incoming.wait()
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _join(out: Tensor, lse: Tensor, rows: Rows, part: Tensor, part_lse: Tensor, *, first: bool) -> None:
    """Merge a block's result into the running one; the first hop covers every query, so it only has to be written."""
    if first:
        out[rows] = part.to(out.dtype)
        lse[rows] = part_lse.to(lse.dtype)
    elif isinstance(rows, slice):
        merge_(out[rows], lse[rows], part, part_lse)
    else:
        joined, joined_lse = out[rows], lse[rows]
        merge_(joined, joined_lse, part, part_lse)
        out[rows], lse[rows] = joined, joined_lse


def _add_gradients(
    dq: Tensor, dk: Tensor, dv: Tensor, parts: Iterable[tuple[Rows, Rows, Tensor, Tensor, Tensor]]
) -> None:
    for rows, keys, part_q, part_k, part_v in parts:
        for whole, where, part in ((dq, rows, part_q), (dk, keys, part_k), (dv, keys, part_v)):
            if isinstance(where, slice):
                whole[where] += part.to(whole.dtype)
            else:
                whole.index_add_(0, where, part.to(whole.dtype))
