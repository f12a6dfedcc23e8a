"""How ranks spend a step, and the memory that they need."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lightning_dcp.report.panel.measured import Measured, shown_ranks

MOST_RANKS = 64


@dataclass(frozen=True)
class RankBar:
    """One rank's mean step.

    Attributes:
        rank: place in the plane.
        busy_s: seconds that it computed.
        transfer_s: seconds that it waited for what was on its way.
        wait_s: seconds that it waited for ranks that had not begun to send.
        rest_s: what is left of the step.
        planned_s: seconds of computing by its plans, scaled to this run's speed.
        memory_bytes: peak over the run; 0 if unknown.
    """

    rank: int
    busy_s: float
    transfer_s: float
    wait_s: float
    rest_s: float
    planned_s: float
    memory_bytes: float


@dataclass(frozen=True)
class RankBars:
    """The ranks of a run.

    Attributes:
        bars: by rank; of very many those that worked longest and shortest.
        ranks: how many there were.
    """

    bars: tuple[RankBar, ...]
    ranks: int

    @property
    def has_memory(self) -> bool:
        """Whether memory was measured."""
        return any(bar.memory_bytes for bar in self.bars)


def rank_bars(measured: Measured) -> RankBars:
    """Means over the steps whose ranks were timed."""
    kept = np.flatnonzero(measured.timed)
    if not len(kept):
        return RankBars((), measured.num_ranks)
    busy, transfer, wait, planned = (
        np.nan_to_num(values[kept]).mean(axis=0)
        for values in (measured.busy, measured.transfer, measured.wait, measured.expected)
    )
    rest = np.maximum(measured.seconds[kept].mean() - busy - transfer - wait, 0.0)
    memory = np.nan_to_num(measured.memory[kept]).max(axis=0)
    chosen = shown_ranks(busy + transfer, MOST_RANKS)
    bars = (RankBar(r, *(float(v[r]) for v in (busy, transfer, wait, rest, planned, memory))) for r in chosen)
    return RankBars(tuple(bars), measured.num_ranks)
