"""What attention a model computes: recorded while it runs one step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor

from lightning_dcp.attention.schemes import ALONE, SCHEMES, AttentionCall, Scheme
from lightning_dcp.attention.schemes.base import Gradients, Saved
from lightning_dcp.attention.shape import AttentionShape


@dataclass(frozen=True)
class RecordedCall:
    """One attention layer's call, whatever pack it was on.

    Attributes:
        shape: heads and dtype.
        causal: whether any sample is causal.
        window_size: see :class:`~lightning_dcp.parallel.blocks.AttentionMask`.
        softcap: 0 for none.
        kernel: by name.
    """

    shape: AttentionShape
    causal: bool = True
    window_size: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    kernel: str = "auto"

    @classmethod
    def of(cls, call: AttentionCall) -> RecordedCall:
        """What is kept of a call."""
        causal = call.mask.causal if isinstance(call.mask.causal, bool) else any(call.mask.causal)
        return cls(call.shape, causal, call.mask.window_size, call.scores.softcap, call.kernel.name)


@dataclass(frozen=True)
class AttentionCalls:
    """Attention calls of one pack on a group of one rank.

    Attributes:
        forward: calls by kind; twice the layers where a checkpointed layer is called again in backward.
        backward: as ``forward``.
    """

    forward: Counter[RecordedCall] = field(default_factory=Counter)
    backward: Counter[RecordedCall] = field(default_factory=Counter)

    @property
    def hop_bytes(self) -> float:
        """Bytes that one hop of a ring would carry for each token of a shard, over all calls."""
        forward = sum(call.shape.forward_bytes * count for call, count in self.forward.items())
        return float(forward + sum(call.shape.backward_bytes * count for call, count in self.backward.items()))


class _Recorded(Scheme):
    """A scheme that counts the calls."""

    name = "recorded"

    def __init__(self, scheme: Scheme, calls: AttentionCalls) -> None:
        self._scheme, self._calls = scheme, calls

    def forward(
        self, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
    ) -> tuple[Tensor, Saved]:
        self._calls.forward[RecordedCall.of(call)] += 1
        return self._scheme.forward(call, q, k, v, sinks)

    def backward(self, call: AttentionCall, grad: Tensor, saved: Saved, sinks: Tensor | None) -> Gradients:
        self._calls.backward[RecordedCall.of(call)] += 1
        return self._scheme.backward(call, grad, saved, sinks)


@contextmanager
def recording() -> Iterator[AttentionCalls]:
    """Record the attention calls made inside, which must be on groups of one rank.

    The scheme of such groups is exchanged for the time of one step, so that every model is seen, whichever way its
    attention reaches it, and so that nothing is left in the way of what is timed afterwards.
    """
    calls, own = AttentionCalls(), SCHEMES[ALONE]
    SCHEMES[ALONE] = _Recorded(own, calls)
    try:
        yield calls
    finally:
        SCHEMES[ALONE] = own
