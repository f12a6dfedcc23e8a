"""What a run comes to in a few numbers, and in a sentence."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_dcp.report.panel.measured import Array, Measured
from lightning_dcp.report.plan_table import seconds
from lightning_dcp.stability.record import Event

STEADY = 1.11
"""Largest p99/p50 that is called steady."""
UNEVEN = 1.25
"""Largest p99/p50 that is called fairly steady."""
FEW = 10
"""Of fewer steps the median says too little for a steadiness."""
NOTHING_LOST = 0.995
"""Steadiness from which slow steps cost no throughput: quick ones made up for them."""


@dataclass(frozen=True)
class RunSummary:
    """A run in numbers.

    Attributes:
        name: of the run.
        steps: that were counted.
        warmup: first steps that were not.
        ranks: of the plane.
        p50_s: median step time.
        p99_s: its 99th percentile.
        total_s: seconds of all steps.
        throughput: tokens a second over all of that time.
        steadiness: p50 x steps / total, 1 at most: the share of the throughput that there would be if each step took the
            median; None with fewer than 10 steps.
        busy_share: of all ranks' time in steps, what they computed; None if ranks were not timed.
        transfer_share: the same of waiting for what was on its way.
        wait_share: the same of waiting for ranks that had not begun to send.
        memory_bytes: peak of the rank that needed most; None if unknown.
        alarms: that were raised.
        open_alarms: subjects whose alarm was not cleared.
        actions: that were taken.
    """

    name: str
    steps: int
    warmup: int
    ranks: int
    p50_s: float
    p99_s: float
    total_s: float
    throughput: float
    steadiness: float | None
    busy_share: float | None
    transfer_share: float | None
    wait_share: float | None
    memory_bytes: float | None
    alarms: int
    open_alarms: tuple[str, ...]
    actions: int

    @property
    def ratio(self) -> float:
        """p99 over p50."""
        return self.p99_s / self.p50_s if self.p50_s else 1.0

    @property
    def word(self) -> str:
        """The run's steadiness in a word or two."""
        return "Steady" if self.ratio <= STEADY else "Fairly steady" if self.ratio <= UNEVEN else "Not steady"

    @property
    def verdict(self) -> str:
        """One sentence."""
        steps = f"{self.steps:,} step{'' if self.steps == 1 else 's'}"
        alarms = f"{self.alarms} alarm{'' if self.alarms == 1 else 's'}" if self.alarms else "no alarms"
        still = f" (still on: {', '.join(self.open_alarms)})" if self.open_alarms else ""
        times = f"{seconds(self.p99_s)} and {seconds(self.p50_s)}"
        return (
            f"{self.word}: over {steps} the p99 step took {self.ratio:.2f}x the p50 ({times}), "
            f"{self._throughput_words}{alarms}{still}."
        )

    @property
    def _throughput_words(self) -> str:
        if self.steadiness is None:
            return ""
        if self.steadiness >= NOTHING_LOST and self.ratio > STEADY:
            return "though quicker steps made up for what the slow ones cost in throughput, "
        return f"throughput was {self.steadiness:.1%} of what it would be if each step took the median, "


def summarise(name: str, measured: Measured, events: Sequence[Event], warmup: int = 0) -> RunSummary:
    """The numbers of a run.

    Args:
        name: of the run.
        measured: the steps that count.
        events: alarms and actions, in order.
        warmup: steps before those.
    """
    p50, p99 = np.quantile(measured.seconds, (0.5, 0.99))
    total = float(measured.seconds.sum())
    memory = _largest(measured.memory)
    still: dict[str, None] = {}
    for event in events:
        if event.kind == "alarm":
            still[event.subject] = None
        elif event.kind == "cleared":
            still.pop(event.subject, None)
    return RunSummary(
        name,
        len(measured.records),
        warmup,
        measured.num_ranks,
        float(p50),
        float(p99),
        total,
        float(measured.tokens.sum()) / total if total else 0.0,
        _steadiness(float(p50), len(measured.records), total),
        _share(measured, measured.busy),
        _share(measured, measured.transfer),
        _share(measured, measured.wait),
        memory or None,
        sum(event.kind == "alarm" for event in events),
        tuple(still),
        sum(event.kind == "action" for event in events),
    )


def _steadiness(p50_s: float, steps: int, total_s: float) -> float | None:
    if steps < FEW:
        return None
    return min(1.0, p50_s * steps / total_s) if total_s else 1.0


def _share(measured: Measured, values: Array) -> float | None:
    """Of the time that ranks were part of steps, the part that ``values`` of it take."""
    available = float((measured.seconds[:, None] * ~np.isnan(values)).sum())
    return float(np.nansum(values)) / available if available else None


def _largest(values: Array) -> float:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # NaN alone: 0
        return float(np.nan_to_num(np.nanmax(values, initial=0.0)))
