"""One call and one autograd contract for all schemes, kinds and kernels of attention over a CP group."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_dcp.attention.kernels import Kernel, choose_kernel
from lightning_dcp.attention.schemes import ALONE, SCHEMES, AttentionCall, Scheme
from lightning_dcp.attention.shape import AttentionShape, Scores
from lightning_dcp.errors import UnsupportedAttentionError
from lightning_dcp.parallel.blocks import AttentionMask
from lightning_dcp.parallel.context import CPContext

ChooseScheme = Callable[[AttentionShape, AttentionMask, CPContext], str]
"""Names the scheme of a call; the same on all ranks of the group."""


class AttentionKind(NamedTuple):
    """What is computed, besides queries, keys and values.

    Attributes:
        mask: which tokens of a sample see which.
        scale: factor of the scores, 1/sqrt(D) by default.
        softcap: scores are capped smoothly at plus and minus this, 0 for no cap.
        sinks: a learned score of each head that takes weight and gives no value, ``[H]``.
    """

    mask: AttentionMask = AttentionMask()
    scale: float | None = None
    softcap: float = 0.0
    sinks: Tensor | None = None


def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    context: CPContext,
    kind: AttentionKind = AttentionKind(),  # noqa: B008  (immutable)
    *,
    scheme: str | ChooseScheme = "ring",
    kernel: str | Kernel = "auto",
) -> Tensor:
    """Attention inside each sample of a pack whose tokens lie on the ranks of a CP group.

    Args:
        q: this rank's queries, ``[num_local_tokens, H, D]``.
        k: this rank's keys, ``[num_local_tokens, H_kv, D]``; H is a multiple of H_kv.
        v: this rank's values, ``[num_local_tokens, H_kv, D_v]``.
        context: group, layout and boundaries of the pack.
        kind: causal or not, window, scale, soft-cap, sinks.
        scheme: how queries and keys come together: ``ring``, ``all_gather``, ``ulysses``, or a function that says.
        kernel: what computes: a kernel or its name; ``auto`` takes the fastest for device and dtype.

    Returns:
        The outputs of this rank's queries, ``[num_local_tokens, H, D_v]``, of q's dtype.

    Raises:
        UnsupportedAttentionError: everything that does not fit together, at once; an unknown scheme or kernel.
    """
    _refuse(_problems(q, k, v, context, kind))
    shape = AttentionShape.of(q, k, v)
    scores = Scores(1 / math.sqrt(q.shape[-1]) if kind.scale is None else kind.scale, kind.softcap)
    chosen = kernel if isinstance(kernel, Kernel) else choose_kernel(shape, scores, kernel)
    name = scheme(shape, kind.mask, context) if callable(scheme) else scheme
    if name not in SCHEMES:
        raise UnsupportedAttentionError(f"unknown exchange scheme {name!r}; there are {', '.join(SCHEMES)}")
    own = SCHEMES[name if context.size > 1 else ALONE]
    return _Attention.apply(q, k, v, kind.sinks, AttentionCall(context, shape, kind.mask, scores, chosen), own)


class _Attention(torch.autograd.Function):
    """Attention by any scheme as one differentiable step."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, call: AttentionCall, scheme: Scheme
    ) -> Tensor:
        q, k, v = (_by_rows(t) for t in (q, k, v))
        with _exactly_as_written(call):
            out, saved = scheme.forward(call, q, k, v, sinks)
        ctx.save_for_backward(*saved, sinks)
        ctx.call, ctx.scheme = call, scheme
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # Checkpointing may run the model's layers again for these, with modes and autocast on.
        *saved, sinks = ctx.saved_tensors
        # Attention modes that are on for the sake of checkpointing need not see each small operation in here.
        with torch._C.DisableTorchFunction(), _exactly_as_written(ctx.call):
            dq, dk, dv, dsinks = ctx.scheme.backward(ctx.call, _by_rows(grads[0]), tuple(saved), sinks)
            dtype = ctx.call.shape.dtype
            own_dsinks = None if dsinks is None else dsinks.to(sinks.dtype)
            return dq.to(dtype), dk.to(dtype), dv.to(dtype), own_dsinks, None, None


def _exactly_as_written(call: AttentionCall) -> AbstractContextManager[None]:
    """Autocast off: it would round products of what was made float32 on purpose."""
    return torch.autocast(call.shape.device, enabled=False)


def _by_rows(x: Tensor) -> Tensor:
    """The same with the numbers of a head next to each other, as kernels take for granted."""
    return x if x.stride(-1) == 1 else x.contiguous()


_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_LARGEST = torch.finfo(torch.float32).max


def _problems(q: Tensor, k: Tensor, v: Tensor, context: CPContext, kind: AttentionKind) -> list[str]:
    expected, problems = context.num_local_tokens, []
    if not (q.dim() == k.dim() == v.dim() == 3):
        return [
            f"q, k and v of shapes {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}, not [tokens, heads, head_dim]"
        ]
    if not (q.shape[0] == k.shape[0] == v.shape[0] == expected):
        problems.append(
            f"attention over {q.shape[0]} queries, {k.shape[0]} keys and {v.shape[0]} values; this rank holds {expected} "
            "tokens of the pack, and context-parallel attention is self-attention over exactly these"
        )
    if k.shape[1] != v.shape[1] or q.shape[2] != k.shape[2]:
        problems.append(
            "heads differ: keys and values must have as many, queries and keys of one size; found q "
            f"{tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        )
    if not k.shape[1] or q.shape[1] % k.shape[1]:
        problems.append(f"{q.shape[1]} query heads are no multiple of {k.shape[1]} key heads")
    if not (q.dtype == k.dtype == v.dtype and q.dtype in _DTYPES):
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
        problems.append(f"q, k and v must be of one dtype of {names}; found {q.dtype}, {k.dtype}, {v.dtype}")
    if not q.shape[2] or not v.shape[2]:
        problems.append("heads of width 0")
    if isinstance(kind.sinks, Tensor) and kind.sinks.device != q.device:
        problems.append(f"sinks on {kind.sinks.device}, queries on {q.device}")
    return problems + kind_problems(kind, q.shape[1], len(context.layout.lengths))


def kind_problems(kind: AttentionKind, heads: int, samples: int | None = None) -> list[str]:
    """What is wrong with a kind of attention for layers with these heads (and a pack of these samples)."""
    problems = _type_problems(kind)
    if problems:
        return problems
    mask = kind.mask
    if samples is not None and isinstance(mask.causal, tuple) and len(mask.causal) != samples:
        problems.append(f"causal or not is given for {len(mask.causal)} samples; the pack has {samples}")
    if len(mask.window_size) != 2 or any(size < -1 for size in mask.window_size):
        problems.append(f"window_size={mask.window_size} is not (left, right) of -1 (all) or more tokens")
    if not 0 <= kind.softcap <= _LARGEST:
        problems.append(f"softcap={kind.softcap} is not a number of 0 (none) or more")
    if kind.scale is not None and not math.isfinite(kind.scale):
        problems.append(f"scale={kind.scale} is not a finite number")
    if kind.sinks is not None and tuple(kind.sinks.shape) != (heads,):
        problems.append(f"sinks of shape {tuple(kind.sinks.shape)}; expected one for each of the {heads} query heads")
    return problems


def _type_problems(kind: AttentionKind) -> list[str]:
    problems = []
    for name, value in (("scale", kind.scale), ("softcap", kind.softcap)):
        if isinstance(value, Tensor):
            problems.append(
                f"{name} is a tensor, which would get no gradient (for a learned scale multiply the query by it)"
            )
        elif value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            problems.append(f"{name}={value!r} is not a number")
    if kind.sinks is not None and not isinstance(kind.sinks, Tensor):
        problems.append(f"sinks are {type(kind.sinks).__name__}, not a tensor [heads]")
    return problems


def _refuse(problems: list[str]) -> None:
    if problems:
        raise UnsupportedAttentionError("; ".join(problems))
