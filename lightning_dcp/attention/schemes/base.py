"""What an exchange scheme is: one way to bring queries together with keys that lie on other ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from lightning_dcp.attention.kernels.base import Kernel
from lightning_dcp.attention.running import KeyValueGradients, RunningGradients, RunningOutput
from lightning_dcp.attention.shape import AttentionShape, Scores
from lightning_dcp.attention.sinks import apply_sinks_, sink_gradient
from lightning_dcp.parallel.blocks import AttentionBlocks, AttentionMask
from lightning_dcp.parallel.context import CPContext

Saved = tuple[Tensor, ...]
Gradients = tuple[Tensor, Tensor, Tensor, Tensor | None]
"""Of q, k, v (this rank's tokens; float32 or better) and of the sinks by this rank's part of the work."""


@dataclass(frozen=True)
class AttentionCall:
    """One attention call on a pack, besides its tensors.

    Attributes:
        context: group, layout and boundaries of the pack.
        shape: heads and dtype.
        mask: which tokens see which.
        scores: how scores are made.
        kernel: what computes blocks.
    """

    context: CPContext
    shape: AttentionShape
    mask: AttentionMask
    scores: Scores
    kernel: Kernel

    def blocks(self, q_rank: int | None, k_rank: int | None) -> tuple[AttentionBlocks, ...]:
        """The blocks from a rank's queries to a rank's keys; None is the whole pack."""
        return self.context.blocks(q_rank, k_rank, self.mask)


class Scheme(ABC):
    """An exchange scheme; all of them compute the same, forward and backward."""

    name: ClassVar[str]
    """By which it is asked for."""

    @abstractmethod
    def forward(
        self, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
    ) -> tuple[Tensor, Saved]:
        """Attention of this rank's queries.

        Args:
            call: the rest of the call.
            q: this rank's queries, ``[n, H, D]``.
            k: this rank's keys, ``[n, H_kv, D]``.
            v: this rank's values, ``[n, H_kv, D_v]``.
            sinks: ``[H]``, or None.

        Returns:
            The outputs of this rank's queries, ``[n, H, D_v]`` in q's dtype, and what the backward needs.
        """

    @abstractmethod
    def backward(self, call: AttentionCall, grad: Tensor, saved: Saved, sinks: Tensor | None) -> Gradients:
        """Gradients from that of the outputs, ``[n, H, D_v]``; may be called several times for one forward."""


def attend(
    call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, blocks: Sequence[AttentionBlocks]
) -> tuple[Tensor, Tensor]:
    """Attention over keys that are all at hand: ``out [n, H, D_v]`` in q's dtype and ``lse [n, H]``."""
    running = RunningOutput(q, v)
    running.add(call.kernel, q, k, v, blocks, call.scores)
    return finish(running, q, sinks)


def finish(running: RunningOutput, q: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """The result when all keys were seen: the only place where it is rounded to q's dtype."""
    apply_sinks_(running.out, running.lse, sinks)
    return running.out.to(q.dtype), running.lse


def attend_backward(
    call: AttentionCall, grad: Tensor, saved: Saved, sinks: Tensor | None, blocks: Sequence[AttentionBlocks]
) -> Gradients:
    """Gradients of :func:`attend`; ``saved`` is ``(q, k, v, out, lse)``."""
    q, k, v, out, lse = saved
    running, found = RunningGradients(q), KeyValueGradients(k, v, lse.dtype)
    for group in blocks:
        running.add(call.kernel.backward(grad.to(q.dtype), q, k, v, out, lse, group, call.scores), found)
    return running.dq, *found.sums(), sink_gradient(grad, out, lse, sinks)
