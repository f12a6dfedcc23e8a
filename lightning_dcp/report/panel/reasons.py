"""Why the slowest steps were slow: the step's critical rank against what is usual for critical ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from lightning_dcp.report.panel.late import late_excess, late_rank
from lightning_dcp.report.panel.measured import Measured
from lightning_dcp.report.panel.series import SLOWEST, distance_of
from lightning_dcp.report.plan_table import seconds
from lightning_dcp.stability.hot import excess_seconds
from lightning_dcp.stability.record import LinkTime, StepRecord

Cause = Literal["work", "compute", "transfer", "start", "wait", "outside"]
"""``work``: the plan foresaw more; ``compute``: slower than the plan foresaw; ``start``: a rank began its packs late;
``outside``: neither packs nor exchange."""


@dataclass(frozen=True)
class StepReason:
    """One slow step.

    Attributes:
        step: its number.
        seconds: that it took.
        excess_s: seconds more than the median step.
        rank: the critical one: it computed and transferred longest.
        busy_s: seconds that it computed.
        planned_s: seconds of computing by its plan, scaled to this run's speed.
        transfer_s: seconds that it was held up by transfers.
        wait_s: seconds that it waited for ranks that had not begun to send.
        dense_tokens: most dense tokens of any shard; None if the step's packs were not kept.
        tokens: of the batch.
        distance: places between sender and receiver, mean over bytes; None if nothing was sent.
        link: the link into the critical rank that held it up longest; None if nothing was sent to it.
        late_rank: who began late, or sent late, where the cause is ``start`` or ``wait``; None if that is not known.
        cause: the largest part of the excess.
        parts: seconds of the excess by cause.
        text: the cause in a sentence.
    """

    step: int
    seconds: float
    excess_s: float
    rank: int
    busy_s: float
    planned_s: float
    transfer_s: float
    wait_s: float
    dense_tokens: int | None
    tokens: int
    distance: float | None
    link: tuple[int, int] | None
    late_rank: int | None
    cause: Cause
    parts: dict[Cause, float]
    text: str


def step_reasons(measured: Measured, *, most: int = SLOWEST) -> tuple[StepReason, ...]:
    """The slowest of the slow steps (1.1 times the median or more), slowest first; nothing if ranks were not timed.

    Args:
        measured: the run's steps.
        most: how many steps.
    """
    if not measured.timed.any():
        return ()
    busy, planned, transfer, wait = (
        measured.at_critical(values) for values in (measured.busy, measured.expected, measured.transfer, measured.wait)
    )
    outside = measured.seconds - busy - transfer - wait
    more = [values - np.nanmedian(values) for values in (busy, planned, transfer, wait, outside)]
    more.append(late_excess(measured.records))
    usual_s = float(np.nanmedian(planned))
    slowest = np.argsort(-measured.seconds, kind="stable")[:most]
    return tuple(
        _reason(measured, i, [float(values[i]) for values in more], usual_s)
        for i in map(int, slowest)
        if measured.timed[i] and excess_seconds(measured.records[i], measured.median_s)
    )


def _reason(measured: Measured, i: int, more: list[float], usual_s: float) -> StepReason:
    """The reason of step ``i``; ``more``: seconds over the usual of computing, plan, transfer, wait, rest and late start."""
    record, rank = measured.records[i], int(measured.critical[i])
    parts = _parts(*more)
    cause = max(parts, key=lambda name: parts[name])
    busy, planned, transfer, wait = (
        float(values[i, rank]) for values in (measured.busy, measured.expected, measured.transfer, measured.wait)
    )
    distance, link = distance_of(record), _worst_link(record, rank)
    late = late_rank(cause, record, rank, parts[cause])
    return StepReason(
        step=record.step,
        seconds=record.seconds,
        excess_s=record.seconds - measured.median_s,
        rank=rank,
        busy_s=busy,
        planned_s=planned,
        transfer_s=transfer,
        wait_s=wait,
        dense_tokens=max((pack.dense_tokens for pack in record.packs), default=None),
        tokens=record.tokens,
        distance=None if np.isnan(distance) else distance,
        link=None if link is None else (link.source, link.target),
        late_rank=None if late is None else late.rank,
        cause=cause,
        parts=parts,
        text=_sentence(cause, record, rank, parts[cause], planned / usual_s if usual_s > 0 else None)
        if late is None
        else late.text,
    )


def _parts(
    busy: float, planned: float, transfer: float, wait: float, outside: float, late: float
) -> dict[Cause, float]:
    """Seconds over the usual by cause: of more computing, what was planned is the batch's work, the rest is slowness.

    Of more waiting and more time outside, the latest rank's late start explains as much as it was late.
    """
    work = min(max(planned, 0.0), max(busy, 0.0))
    waited = min(late, max(wait, 0.0))
    idle = min(late - waited, max(outside, 0.0))
    return {
        "work": work,
        "compute": busy - work,
        "transfer": transfer,
        "start": waited + idle,
        "wait": wait - waited,
        "outside": outside - idle,
    }


def _sentence(cause: Cause, record: StepRecord, rank: int, part_s: float, planned: float | None) -> str:
    """The cause in words; ``planned``: computing by the plan over the usual, None if plans predict nothing."""
    much = seconds(max(part_s, 0.0))
    if cause == "work":
        return f"More work: the plan gave rank {rank} {planned or 1.0:.2f}x the usual to compute."
    if cause == "compute" and planned is None:
        return f"More or slower computing: rank {rank} took {much} longer than usual{_queued(record, rank, part_s)}."
    if cause == "compute":
        return f"Slow computing: rank {rank} took {much} longer than its plan explains{_queued(record, rank, part_s)}."
    if cause == "transfer":
        return f"Slow transfer: rank {rank} was held up {much} longer than usual{_by_link(record, rank)}."
    if cause == "wait":
        return f"Late sender: rank {rank} waited {much} longer than usual for ranks that had not begun to send."
    return f"Outside of computing and exchange: {much} more than usual passed on rank {rank}."


def _queued(record: StepRecord, rank: int, part_s: float) -> str:
    """That the rank had no core to compute on, where that is much of the cause."""
    queued = sum(time.queued_s for time in record.ranks if time.rank == rank)
    return f"; for {seconds(queued)} it had no core to run on" if queued > 0 and queued >= part_s / 2 else ""


def _worst_link(record: StepRecord, rank: int) -> LinkTime | None:
    """The link into a rank that held it up longest."""
    return max((link for link in record.links if link.target == rank), key=lambda link: link.transfer_s, default=None)


def _by_link(record: StepRecord, rank: int) -> str:
    worst = _worst_link(record, rank)
    if worst is None:
        return ", in collectives"
    expected = worst.expected_s * worst.hops
    times = f", which took {worst.transfer_s / expected:.1f}x its expected time" if expected > 0 else ""
    return f", most by link {worst.source}->{worst.target}{times}"
