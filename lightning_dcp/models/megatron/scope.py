"""What a Megatron-Core layer may ask about the call that it is part of: its pack, its group, its share of the batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_dcp.attention.options import DEFAULT, AttentionOptions
from lightning_dcp.parallel.context import CPContext


@dataclass(frozen=True, eq=False)
class PackScope:
    """One call of a model on one pack, seen from one rank.

    Attributes:
        context: CP group and layout of the call's sequences. A rank's tokens in the model are those of the context with
            fill tokens behind them, ``context.num_region_tokens``; with sequence parallelism each tensor-parallel rank
            has an equal contiguous part of these.
        attention: how attention is computed.
        batch_tokens: tokens of the whole batch, over all ranks: an auxiliary loss that is a mean over tokens counts the
            pack with its share of these.
        batch_samples: sequences of the whole batch, over all ranks, for means over sequences; as many a sample as in this call.
        gradient_scale: factor of a gradient that does not come through the step's loss (1 / accumulate_grad_batches,
            times the scale of a GradScaler).
        samples: which samples of the batch the sequences are, by their index; None for sequences that are no samples.
    """

    context: CPContext
    attention: AttentionOptions = DEFAULT
    batch_tokens: int = 1
    batch_samples: float = 1.0
    gradient_scale: float = 1.0
    samples: tuple[int, ...] | None = None


class Scope:
    """The scope of the call whose forward, or whose recomputed layers, run now; one object for each model.

    Layers find it here because Megatron-Core has no argument that reaches all of them. It is set for the length of a
    forward, and by autograd as soon as a backward enters the part of the graph that a call has made: a pipeline runs a
    micro-batch's backward after another's forward, and checkpointing calls layers again in it.

    Attributes:
        current: the scope; None outside calls on packs.
    """

    def __init__(self) -> None:
        self.current: PackScope | None = None

    @contextmanager
    def inside(self, scope: PackScope) -> Iterator[None]:
        """A forward on a pack."""
        before, self.current = self.current, scope
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Around forwards and backwards: what they leave behind is not there for calls outside steps."""
        before = self.current
        try:
            yield
        finally:
            self.current = before

    def mark(self, out: Tensor, scope: PackScope) -> Tensor:
        """The identity of a call's output; its backward makes the call's scope the current one."""
        return _BackwardEnters.apply(out, self, scope) if out.requires_grad else out

    def __deepcopy__(self, memo: Any) -> Scope:
        return Scope()


class _BackwardEnters(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, owner: Scope, scope: PackScope) -> Tensor:
        ctx.owner, ctx.scope = owner, scope
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        ctx.owner.current = ctx.scope
        return grads[0], None, None
