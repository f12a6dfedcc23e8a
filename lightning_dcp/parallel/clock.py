"""How long this rank waits for others, measured where it waits."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class WaitClock:
    """Adds up the seconds that the host spends blocked in communication.

    On CPU ranks this is the time a rank is not computing. On CUDA, where waiting happens on the device, it counts only
    what blocks the host.
    """

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time inside as waiting."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - start
