"""Which steps of a run are recorded with a timeline."""

from __future__ import annotations

from collections import deque

import numpy as np

_REMEMBERED = 1000
"""Steps that the 99th percentile is of."""


class KeptSteps:
    """The first step, one every few, and each that is slower than 99 % of those before it.

    Args:
        every: steps from one to the next that is kept in any case; 0: none but the first.
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self._seen = 0
        self._seconds: deque[float] = deque(maxlen=_REMEMBERED)

    def keeps(self, seconds: float) -> bool:
        """Count a step, and say whether it is kept."""
        regular = self._seen == 0 or (self.every > 0 and self._seen % self.every == 0)
        slow = bool(self._seconds) and seconds > float(np.quantile(self._seconds, 0.99))
        self._seen += 1
        self._seconds.append(seconds)
        return regular or slow
