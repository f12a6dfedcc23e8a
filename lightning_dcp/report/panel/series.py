"""Step by step: time, load of the ranks, and how far and how long data travelled. Long runs become points of several steps."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightning_dcp.report.panel.measured import Array, Measured
from lightning_dcp.stability.record import StepRecord

MOST_POINTS = 800
"""Points of a line; about one a pixel."""
SLOWEST = 5
Line = tuple[float | None, ...]
"""A value at each point; None where there is none."""


@dataclass(frozen=True)
class StepSeries:
    """Lines over the steps of a run; a point is one step, or the same number of them, the last one's perhaps fewer.

    Attributes:
        numbers: the first step of each point.
        steps_a_point: how many steps a point is.
        window: steps before and at a point's last one that ``p50_s`` and ``p99_s`` are of.
        low_s: shortest step of each point.
        median_s: the median of its steps.
        high_s: longest.
        p50_s: median over the window.
        p99_s: 99th percentile over the window.
        predicted_s: median of the plans' predictions, times ``predicted_scale``; empty if nothing was predicted.
        predicted_scale: median of measured over median of predicted time.
        load: computing of the busiest rank over the mean of all, median.
        planned_load: the same by the cost model.
        distance: places of the plane between sender and receiver, mean over bytes.
        held_up_s: seconds that the rank held up longest by transfers was; the largest of the point.
        slowest: number and seconds of the slowest steps above the median, slowest first.
    """

    numbers: tuple[int, ...]
    steps_a_point: int
    window: int
    low_s: Line
    median_s: Line
    high_s: Line
    p50_s: Line
    p99_s: Line
    predicted_s: Line
    predicted_scale: float
    load: Line
    planned_load: Line
    distance: Line
    held_up_s: Line
    slowest: tuple[tuple[int, float], ...]

    @property
    def has_ranks(self) -> bool:
        """Whether there is a load to draw: two ranks or more that were timed."""
        return any(value is not None for value in self.load)

    @property
    def has_links(self) -> bool:
        """Whether anything was sent between ranks."""
        return any(value is not None for value in self.distance)


def step_series(measured: Measured, *, most_points: int = MOST_POINTS) -> StepSeries:
    """The lines of a run.

    Args:
        measured: its steps.
        most_points: most points of a line.
    """
    n = len(measured.seconds)
    size = -(-n // most_points)
    window = min(n, max(50, n // 20))
    p50, p99 = _rolling(measured.seconds, size, window)
    scale = _predicted_scale(measured)
    held_up = measured.transfer if measured.num_ranks else np.full((n, 1), np.nan)

    def points(values: Array, of: Callable[..., Any] = np.nanmedian) -> Line:
        return by_points(values, size, of)

    slowest = np.argsort(-measured.seconds, kind="stable")[:SLOWEST]
    return StepSeries(
        tuple(int(number) for number in measured.number[::size]),
        size,
        window,
        points(measured.seconds, np.nanmin),
        points(measured.seconds),
        points(measured.seconds, np.nanmax),
        p50,
        p99,
        points(measured.predicted * scale) if scale else (),
        scale,
        points(_load(measured.busy)),
        points(_load(measured.expected)),
        points(np.array([distance_of(record) for record in measured.records]), np.nanmean),
        points(_quiet(np.nanmax, held_up, axis=1), np.nanmax),
        tuple(
            (int(measured.number[i]), float(measured.seconds[i]))
            for i in slowest
            if measured.seconds[i] > measured.median_s
        ),
    )


def distance_of(record: StepRecord) -> float:
    """Places of the plane between sender and receiver in one step, mean over bytes; NaN if nothing was sent."""
    total = sum(link.num_bytes for link in record.links)
    far = sum(link.num_bytes * abs(link.source - link.target) for link in record.links)
    return far / total if total else float("nan")


def by_points(values: Array, size: int, of: Callable[..., Any]) -> Line:
    """Values of ``size`` steps at a time as one.

    Args:
        values: one of each step; NaN where there is none.
        size: steps a point.
        of: makes one of the values of a point, without NaN.
    """
    padded = np.concatenate([values, np.full(-len(values) % size, np.nan)]).reshape(-1, size)
    return tuple(None if np.isnan(value) else float(value) for value in _quiet(of, padded, axis=1))


def _rolling(values: Array, size: int, window: int) -> tuple[Line, Line]:
    """p50 and p99 of the ``window`` steps up to each point's last."""
    ends = [min(i + size, len(values)) for i in range(0, len(values), size)]
    found = [np.quantile(values[max(0, end - window) : end], (0.5, 0.99)) for end in ends]
    return tuple(float(p50) for p50, _ in found), tuple(float(p99) for _, p99 in found)


def _load(values: Array) -> Array:
    """The largest of the ranks over their mean, by step; NaN with fewer than two ranks, or if none did anything."""
    if values.shape[1] < 2:
        return np.full(len(values), np.nan)
    mean = _quiet(np.nanmean, values, axis=1)
    return np.asarray(_quiet(np.nanmax, values, axis=1) / np.where(mean > 0, mean, np.nan))


def _predicted_scale(measured: Measured) -> float:
    """Measured over predicted step time, medians over the steps with a prediction; 0 without one."""
    known = measured.predicted > 0
    if not known.any():
        return 0.0
    return float(np.median(measured.seconds[known]) / np.median(measured.predicted[known]))


def _quiet(of: Callable[..., Any], values: Array, axis: int) -> Array:
    """A function of numpy's that passes over NaN; where there is nothing else, NaN without its warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return np.asarray(of(values, axis=axis), dtype=np.float64)
