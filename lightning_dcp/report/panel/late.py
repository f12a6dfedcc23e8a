"""Which rank the others waited for: one that began its packs late, or one that came late to a common pack."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_dcp.report.panel.measured import Array
from lightning_dcp.report.plan_table import seconds
from lightning_dcp.stability.hot import late_start
from lightning_dcp.stability.record import StepRecord


@dataclass(frozen=True)
class Late:
    """A late rank, and what it did in a sentence."""

    rank: int
    text: str


def late_excess(records: Sequence[StepRecord]) -> Array:
    """Seconds that the last rank of each step began after the first, over the median step's; 0 or more.

    Args:
        records: of the run; those without packs get 0.

    Returns:
        (n,).
    """
    found = [late_start(record.packs) for record in records]
    known = [late[1] for late in found if late is not None]
    usual = float(np.median(known)) if known else 0.0
    return np.array([0.0 if late is None else max(0.0, late[1] - usual) for late in found], dtype=np.float64)


def late_rank(cause: str, record: StepRecord, rank: int, part_s: float) -> Late | None:
    """The rank to blame for a late start or for a long wait; None for other causes, and if nothing tells.

    Args:
        cause: of the step's excess.
        record: the step.
        rank: its critical one.
        part_s: seconds that are owed to the cause.
    """
    if cause == "start" and (late := late_start(record.packs)) is not None:
        victim = "" if late[0] == rank else f"; rank {rank} waited for it"
        return Late(late[0], f"Late start: rank {late[0]} began its packs {seconds(late[1])} after the first{victim}.")
    return _late_sender(record, rank, part_s) if cause == "wait" else None


def _late_sender(record: StepRecord, rank: int, part_s: float) -> Late | None:
    """The rank that came to a common pack so late that it explains the wait; else that which waited least itself."""
    head = f"Late sender: rank {rank} waited {seconds(max(part_s, 0.0))} longer than usual"
    own = {pack.number: pack.start_s for pack in record.packs if pack.rank == rank and pack.cp_size > 1}
    behind = [(p.start_s - own[p.number], p.rank, p.number) for p in record.packs if p.rank != rank and p.number in own]
    if behind and (last := max(behind))[0] >= part_s / 2:
        return Late(last[1], f"{head} for rank {last[1]}, which came to pack {last[2]} {seconds(last[0])} after it.")
    peers = {entry[1] for entry in behind}
    waits = [
        (time.wait_s, time.rank) for time in record.ranks if time.rank != rank and (not peers or time.rank in peers)
    ]
    waited = next(time.wait_s for time in record.ranks if time.rank == rank)
    if not waits or min(waits)[0] > waited - part_s / 2:
        return None
    least = min(waits)
    return Late(
        least[1],
        f"{head}, most likely for rank {least[1]}: it sent late and waited least itself ({seconds(least[0])}).",
    )
