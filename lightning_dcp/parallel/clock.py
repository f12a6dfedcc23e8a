"""How long this rank waits for others, measured where it waits."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_dcp.parallel.hop_times import HopMark, HopRecorder


class WaitClock:
    """Adds up the seconds that the host spends blocked in communication.

    On CPU ranks this is the time a rank is not computing. On CUDA, where waiting happens on the device, it counts only
    what blocks the host; its recorder tells the rest.

    Attributes:
        seconds: waited so far.
        recorder: notes every hop and collective of attention and sharding, too; None: nothing but the sum.
    """

    def __init__(self, recorder: HopRecorder | None = None) -> None:
        self.seconds = 0.0
        self.recorder = recorder

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time inside as waiting."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - start

    @contextmanager
    def collective(self, ranks: Sequence[int]) -> Iterator[None]:
        """Count the time inside as waiting in a collective of these ranks of the world."""
        mark = None if self.recorder is None else self.recorder.collective_begins(ranks)
        with self.waiting():
            yield
        if mark is not None:
            mark.ends()

    def hop_posted(self, source: int, target: int, received: int, sent: int) -> HopMark | None:
        """A hop is about to be posted: from ``source`` in the world ``received`` bytes, to ``target`` ``sent`` bytes."""
        return None if self.recorder is None else self.recorder.hop_posted(source, target, received, sent)
