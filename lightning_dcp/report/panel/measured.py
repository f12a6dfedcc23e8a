"""The numbers of a run's steps as arrays, which the parts of the panel are made from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_dcp.errors import DataError
from lightning_dcp.stability.record import StepRecord

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Measured:
    """Steps of a run: n steps on R ranks. NaN where a rank was not part of a step or nothing was predicted.

    Attributes:
        records: the steps.
        number: of each step, (n,).
        seconds: that it took, (n,).
        tokens: of its batch, (n,).
        predicted: seconds by its plan, (n,).
        busy: seconds that each rank computed, (n, R).
        wait: seconds that it waited for ranks that had not begun to send, (n, R).
        transfer: seconds that it waited for what was on its way, (n, R).
        expected: seconds of computing by the cost model, (n, R), times ``scale``.
        memory: peak bytes, (n, R).
        scale: what the cost model's seconds are multiplied by, so that all ranks' computing adds up to what was measured.
    """

    records: tuple[StepRecord, ...]
    number: NDArray[np.int64]
    seconds: Array
    tokens: Array
    predicted: Array
    busy: Array
    wait: Array
    transfer: Array
    expected: Array
    memory: Array
    scale: float

    @property
    def num_ranks(self) -> int:
        """R."""
        return int(self.busy.shape[1])

    @property
    def timed(self) -> NDArray[np.bool_]:
        """Which steps' ranks were timed, (n,)."""
        return (
            np.asarray(~np.isnan(self.busy).all(axis=1)) if self.num_ranks else np.zeros(len(self.seconds), dtype=bool)
        )

    @property
    def median_s(self) -> float:
        """Median of the step times, seconds."""
        return float(np.median(self.seconds))

    @property
    def critical(self) -> NDArray[np.int64]:
        """The rank of each step that computed and transferred longest: the others wait for it.

        (n,); needs R > 0, and means something for timed steps only.
        """
        work = np.nan_to_num(self.busy + self.transfer, nan=-1.0)
        return np.asarray(work.argmax(axis=1), dtype=np.int64)

    def at_critical(self, values: Array) -> Array:
        """Those of (n, R) values that belong to the critical ranks, (n,)."""
        return np.asarray(values[np.arange(len(values)), self.critical])


def measure(records: Sequence[StepRecord]) -> Measured:
    """Arrays of steps.

    Args:
        records: one or more steps, ascending.

    Raises:
        DataError: there is no step.
    """
    if not records:
        raise DataError("the run's record holds no step yet: let it train for a step, or name another run's folder")
    ranks = 1 + max((rank.rank for record in records for rank in record.ranks), default=-1)
    filled = np.full((5, len(records), ranks), np.nan)
    for row, record in enumerate(records):
        for r in record.ranks:
            filled[:, row, r.rank] = r.busy_s, r.wait_s, r.transfer_s, r.expected_s, r.memory_bytes
    busy, wait, transfer, expected, memory = filled
    planned = float(np.nansum(expected))
    scale = float(np.nansum(busy)) / planned if planned > 0 else 1.0
    return Measured(
        tuple(records),
        np.array([r.step for r in records], dtype=np.int64),
        np.array([r.seconds for r in records], dtype=np.float64),
        np.array([r.tokens for r in records], dtype=np.float64),
        np.array([np.nan if r.predicted_s is None else r.predicted_s for r in records], dtype=np.float64),
        busy, wait, transfer, expected * scale, memory, scale,
    )  # fmt: skip


def shown_ranks(weights: Array, most: int) -> tuple[int, ...]:
    """Ranks to draw where there are too many: half of them those of largest weight, half those of smallest.

    Args:
        weights: a number for each rank, (R,).
        most: how many can be drawn.
    """
    if len(weights) <= most:
        return tuple(range(len(weights)))
    order = np.argsort(np.nan_to_num(weights), kind="stable")
    half = most // 2
    return tuple(sorted(int(r) for r in (*order[:half], *order[len(order) - (most - half) :])))
