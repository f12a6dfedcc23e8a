"""Which tokens the rows of a router's logits are: of which samples, and whether of any."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dcp.models.megatron.scope import PackScope
from lightning_dcp.parallel.context import CPContext


@dataclass(frozen=True, eq=False)
class RouterRows:
    """The rows of one router's call on one rank.

    Attributes:
        sample: which of the call's samples each row belongs to, int64 ``[rows]``; any where it is no sample's.
        real: whether a row is a sample's token, bool ``[rows]``; fill tokens and padding are not.
        num_samples: samples of the call, over all ranks of its CP group.
        batch_tokens: tokens of the whole batch.
        batch_samples: samples of the whole batch.
        gradient_scale: factor of a gradient that does not come through the step's loss.
        summed: adds up a tensor over the ranks that hold the call's other tokens. Collective over these.
    """

    sample: Tensor
    real: Tensor
    num_samples: int
    batch_tokens: int
    batch_samples: float
    gradient_scale: float
    summed: Callable[[Tensor], Tensor]


def rows_of(scope: PackScope | None, logits: Tensor, tensor_group: Any) -> RouterRows:
    """What the rows of a router's logits are.

    Args:
        scope: the call under way; None outside a region, where each row of the batch is a sample, and all of them are the batch.
        logits: ``[T, B, experts]``.
        tensor_group: the tensor-parallel ranks that hold equal contiguous parts of a rank's tokens (sequence parallelism); None
            if each holds all of them.
    """
    if scope is None:
        return _of_batch(logits, tensor_group)
    if scope not in _ROWS:
        _ROWS[scope] = _of_pack(scope, tensor_group)
    return _ROWS[scope]


_ROWS: WeakKeyDictionary[PackScope, RouterRows] = WeakKeyDictionary()
"""What all layers of a call ask for, kept as long as the call's scope lives."""


def _of_pack(scope: PackScope, tensor_group: Any) -> RouterRows:
    context = scope.context
    ends = torch.tensor(context.layout.lengths, device=context.device).cumsum(0)
    sample = context.with_fill(torch.searchsorted(ends, context.pack_index, right=True))
    sample, real = (_part(rows, tensor_group) for rows in (sample, context.is_real))
    return RouterRows(
        sample,
        real,
        len(context.layout.lengths),
        scope.batch_tokens,
        scope.batch_samples,
        scope.gradient_scale,
        _Sum(context, tensor_group),
    )


def _part(rows: Tensor, tensor_group: Any) -> Tensor:
    return rows if tensor_group is None else rows.chunk(tensor_group.size())[tensor_group.rank()]


def _of_batch(logits: Tensor, tensor_group: Any) -> RouterRows:
    tokens, samples = logits.shape[:2]
    rows = torch.arange(samples, device=logits.device).repeat(tokens)
    whole = logits.shape[0] * samples * (1 if tensor_group is None else tensor_group.size())
    return RouterRows(
        rows, torch.ones_like(rows, dtype=torch.bool), samples, whole, samples, 1.0, _Sum(None, tensor_group)
    )


@dataclass(frozen=True, eq=False)
class _Sum:
    """The sum over a call's CP group and over the tensor-parallel ranks that hold parts of the tokens."""

    context: CPContext | None
    tensor_group: Any

    def __call__(self, tensor: Tensor) -> Tensor:
        context = self.context
        if context is not None and context.size > 1:
            every = context.exchange.all_gather(tensor, [len(tensor)] * context.size)
            tensor = every.view(context.size, *tensor.shape).sum(0)
        if self.tensor_group is not None:
            tensor = tensor.clone()
            dist.all_reduce(tensor, group=self.tensor_group)
        return tensor
