"""Two runs side by side."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lightning_dcp.report.panel.measured import Array, Measured
from lightning_dcp.report.panel.summary import RunSummary

BINS = 48
TAIL = 1.15
"""The last bin begins at the larger p99 times this, and holds all that is longer."""


@dataclass(frozen=True)
class Histogram:
    """Step times of both runs.

    Attributes:
        edges_s: of the bins, seconds; one more than bins.
        shares: of the steps of the first and of the second run, by bin.
        has_tail: whether the last bin holds longer steps, too.
    """

    edges_s: tuple[float, ...]
    shares: tuple[tuple[float, ...], tuple[float, ...]]
    has_tail: bool


@dataclass(frozen=True)
class Comparison:
    """Two runs.

    Attributes:
        first: the run that the panel is about.
        second: the other one.
        histogram: their step times.
    """

    first: RunSummary
    second: RunSummary
    histogram: Histogram

    @property
    def verdict(self) -> str:
        """One sentence: throughput and steadiness of the first against the second."""
        first, second = self.first, self.second
        times = first.throughput / second.throughput if second.throughput else float("nan")
        return (
            f"{first.name} trains at {times:.2f}x the tokens a second of {second.name}, "
            f"with a p99/p50 of {first.ratio:.2f} beside {second.ratio:.2f} (more tokens a second are better, "
            "a lower p99/p50 is steadier)."
        )

    @property
    def warning(self) -> str:
        """What makes the two hard to compare; empty if nothing does."""
        first, second = self.first, self.second
        if first.steps == second.steps:
            return ""
        return (
            f"The runs are of unequal length: {first.steps:,} and {second.steps:,} steps. They saw different batches, and the "
            "p99 of the shorter one is less certain: compare runs of the same steps before you trust a small difference."
        )


def compare(first: tuple[RunSummary, Measured], second: tuple[RunSummary, Measured]) -> Comparison:
    """The comparison of two runs."""
    return Comparison(first[0], second[0], histogram(first[1].seconds, second[1].seconds))


def histogram(first: Array, second: Array, bins: int = BINS) -> Histogram:
    """Shares of steps by step time.

    Args:
        first: seconds of one run's steps.
        second: of the other's.
        bins: how many.
    """
    low = float(min(first.min(), second.min()))
    longest = float(max(first.max(), second.max()))
    high = min(longest, TAIL * max(float(np.quantile(first, 0.99)), float(np.quantile(second, 0.99))))
    if high <= low:  # all steps the same
        low, high = low * 0.95, (high or 1.0) * 1.05
    edges = np.linspace(low, high, bins + 1)
    shares = [np.histogram(np.minimum(values, high), edges)[0] / len(values) for values in (first, second)]
    one, other = (tuple(float(share) for share in of) for of in shares)
    return Histogram(tuple(float(edge) for edge in edges), (one, other), longest > high)
