"""All-gather: every rank gets all keys and values of the pack, and computes with them at once.

As Llama 3 was trained, https://arxiv.org/abs/2407.21783 section 3.3.2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_dcp.attention.schemes.base import AttentionCall, Gradients, Saved, Scheme, attend, attend_backward
from lightning_dcp.parallel.context import CPContext


class AllGather(Scheme):
    """One collective forward; backward the same again, and a reduce-scatter. Large blocks, but all keys on every rank."""

    name = "all_gather"

    def forward(  # noqa: D102
        self, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
    ) -> tuple[Tensor, Saved]:
        all_k, all_v = _gather(k, v, call.context)
        out, lse = attend(call, q, all_k, all_v, sinks, call.blocks(call.context.rank, None))
        return out, (q, k, v, out, lse)

    def backward(self, call: AttentionCall, grad: Tensor, saved: Saved, sinks: Tensor | None) -> Gradients:  # noqa: D102
        q, k, v, out, lse = saved
        everywhere = q, *_gather(k, v, call.context), out, lse
        blocks = call.blocks(call.context.rank, None)
        dq, dk, dv, dsinks = attend_backward(call, grad, everywhere, sinks, blocks)
        del everywhere
        found = [dk, dv]
        del dk, dv
        return dq, *_reduce_scatter(found, call.context), dsinks


def _gather(k: Tensor, v: Tensor, context: CPContext) -> tuple[Tensor, Tensor]:
    """Keys and values of all ranks, in the pack's order."""
    if context.size == 1:
        return k, v
    shares = context.exchange.all_gather(_joined(k, v), context.tokens)
    both = torch.empty_like(shares)
    both[context.gather_index] = shares
    return _parted(both, (k.shape[2], v.shape[2]))


def _reduce_scatter(found: list[Tensor], context: CPContext) -> tuple[Tensor, Tensor]:
    """The sums over all ranks of the gradients of this rank's keys and values.

    Args:
        found: gradients of the whole pack's keys and values; taken out of the list, to be freed before anything is sent.
        context: group and layout.
    """
    dk, dv = found
    found.clear()
    if context.size == 1:
        return dk, dv
    widths = dk.shape[2], dv.shape[2]
    shares = dk.new_empty((*dk.shape[:2], sum(widths)))
    for part, place in zip((dk, dv), shares.split(widths, dim=-1), strict=True):
        place.copy_(part[context.gather_index])
    del dk, dv, part
    return _parted(context.exchange.reduce_scatter(shares, context.tokens), widths)


def _joined(k: Tensor, v: Tensor) -> Tensor:
    """``[n, H_kv, D]`` and ``[n, H_kv, D_v]`` to ``[n, H_kv, D + D_v]``."""
    return torch.cat([k, v], dim=-1)


def _parted(both: Tensor, widths: tuple[int, int]) -> tuple[Tensor, Tensor]:
    k, v = both.split(widths, dim=-1)
    return k, v
