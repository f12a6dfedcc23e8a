"""Sharding on entry to a region, and gathering on its exit.

One invariant holds for every parameter, inside a region or outside: **the sum of its gradients over the ranks of a CP
group is its true gradient.** Each rank of the group computes the same loss from the gathered outputs, so:

- the loss of a pack is scaled by 1/c before backward (:mod:`lightning_dcp.loss.weighting`): a parameter used outside
  the region gets 1/c of its gradient on each of the c ranks;
- the gather's backward is a slice times c: inside the region each rank gets the whole gradient of its own tokens;
- the shard's backward gathers these and divides by c: before the region each rank has 1/c of every gradient again, as
  the gather of a region before it takes for granted.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_dcp.parallel.context import CPContext


def shard(packed: Tensor, context: CPContext) -> Tensor:
    """This rank's tokens of a packed tensor: ``[T, ...]`` to ``[num_local_tokens, ...]``."""
    if context.size == 1:
        return packed
    return _Shard.apply(packed, context)


def gather(local: Tensor, context: CPContext) -> Tensor:
    """The tokens of all ranks in the pack's order: ``[num_local_tokens, ...]`` to ``[T, ...]``, on every rank."""
    if context.size == 1:
        return local
    return _Gather.apply(local, context)


class _Shard(torch.autograd.Function):
    """A slice; backward: all ranks' gradients together, over c (see the module's docstring)."""

    @staticmethod
    def forward(ctx: Any, packed: Tensor, context: CPContext) -> Tensor:
        ctx.context = context
        return packed.index_select(0, context.pack_index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _gather(grads[0], ctx.context) / ctx.context.size, None


class _Gather(torch.autograd.Function):
    """All-gather of unequal shares; backward: the slice of this rank's tokens, times c (see the module's docstring)."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, context: CPContext) -> Tensor:
        ctx.context = context
        return _gather(local, context)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        context: CPContext = ctx.context
        return grads[0].index_select(0, context.pack_index) * context.size, None


def _gather(local: Tensor, context: CPContext) -> Tensor:
    whole = local.new_empty((context.layout.num_tokens, *local.shape[1:]))
    whole[context.gather_index] = context.exchange.all_gather(local, context.tokens)
    return whole
