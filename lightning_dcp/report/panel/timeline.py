"""Chosen steps in time: what each rank did, pack by pack."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from lightning_dcp.report.panel.measured import Array, shown_ranks
from lightning_dcp.stability.record import IntervalKind, PackTime, StepRecord

SLOW_STEPS = 3
NEAR = 0.15
"""Seconds off the median, over the median, up to which a step is near it."""
MOST_RANKS = 32
MOST_STRETCHES = 450
"""Of one rank in one step: more of them are put into so many bins."""


@dataclass(frozen=True)
class Stretch:
    """A part of one rank's time.

    Attributes:
        kind: what it did; ``untimed``: a pack whose inside was not timed.
        cp_size: of the pack; 0 where it does not matter (``wait``, ``transfer``).
        start_s: seconds from the step's start.
        end_s: as ``start_s``.
    """

    kind: IntervalKind | str
    cp_size: int
    start_s: float
    end_s: float


@dataclass(frozen=True)
class TimelineRow:
    """One rank in one step."""

    rank: int
    packs: tuple[PackTime, ...]
    stretches: tuple[Stretch, ...]


@dataclass(frozen=True)
class StepTimeline:
    """One step.

    Attributes:
        step: its number.
        seconds: that it took.
        role: why it was chosen, such as ``slowest``.
        rows: ranks, ascending; of very many those that worked longest and shortest.
        ranks: how many there were.
        cp_sizes: of its packs, ascending.
    """

    step: int
    seconds: float
    role: str
    rows: tuple[TimelineRow, ...]
    ranks: int
    cp_sizes: tuple[int, ...]


def timelines(
    records: Sequence[StepRecord], median_s: float, *, slow_steps: int = SLOW_STEPS
) -> tuple[StepTimeline, ...]:
    """The step nearest to the median and the slowest ones, among those whose packs were kept.

    Args:
        records: of the run.
        median_s: of its step times, seconds.
        slow_steps: how many slow ones.
    """
    return tuple(_timeline(record, role) for record, role in _chosen(records, median_s, slow_steps))


def _chosen(records: Sequence[StepRecord], median_s: float, slow_steps: int) -> Iterator[tuple[StepRecord, str]]:
    """Of steps with packs; those with intervals where there are any."""
    kept = [record for record in records if any(pack.intervals for pack in record.packs)]
    kept = kept or [record for record in records if record.packs]
    if not kept:
        return
    middle = min(kept, key=lambda record: (abs(record.seconds - median_s), record.step))
    near = abs(middle.seconds - median_s) <= NEAR * median_s
    yield middle, "near the median" if near else "the one kept that is nearest to the median"
    slower = [record for record in kept if record is not middle and record.seconds > median_s]
    for place, record in enumerate(sorted(slower, key=lambda record: (-record.seconds, record.step))[:slow_steps], 1):
        yield record, "slowest" if place == 1 else f"number {place} of the slowest"


def _timeline(record: StepRecord, role: str) -> StepTimeline:
    by_rank: dict[int, list[PackTime]] = defaultdict(list)
    for pack in record.packs:
        by_rank[pack.rank].append(pack)
    ranks = 1 + max([*by_rank, *(rank.rank for rank in record.ranks)])
    worked = np.zeros(ranks)
    for pack in record.packs:
        worked[pack.rank] += _worked_s(pack)
    end = max([record.seconds, *(pack.end_s for pack in record.packs)])
    rows = tuple(_row(rank, by_rank[rank], end) for rank in shown_ranks(worked, MOST_RANKS))
    return StepTimeline(record.step, end, role, rows, ranks, tuple(sorted({pack.cp_size for pack in record.packs})))


def _worked_s(pack: PackTime) -> float:
    """Seconds of a pack that its rank did not wait for others."""
    waited = sum(i.end_s - i.start_s for i in pack.intervals if i.kind == "wait")
    return pack.end_s - pack.start_s - waited


def _row(rank: int, packs: list[PackTime], end_s: float) -> TimelineRow:
    packs = sorted(packs, key=lambda pack: pack.start_s)
    stretches = [stretch for pack in packs for stretch in _stretches(pack)]
    return TimelineRow(rank, tuple(packs), coarse(stretches, end_s))


def _stretches(pack: PackTime) -> list[Stretch]:
    if not pack.intervals:
        return [Stretch("untimed", pack.cp_size, pack.start_s, pack.end_s)]
    return [Stretch(i.kind, pack.cp_size if i.kind == "compute" else 0, i.start_s, i.end_s) for i in pack.intervals]


def coarse(stretches: Sequence[Stretch], end_s: float, most: int = MOST_STRETCHES) -> tuple[Stretch, ...]:
    """As many stretches as can be drawn: of too many, each of ``most`` bins gets one kind, so that shares of time stay.

    A bin is given to the kind that most time is owed to: what fills it, and what bins before it owe (error diffusion).

    Args:
        stretches: of one rank.
        end_s: of the step.
        most: how many stretches may be drawn.
    """
    if len(stretches) <= most:
        return tuple(stretches)
    edges = np.linspace(0.0, end_s, most + 1)
    kinds = list(dict.fromkeys((s.kind, s.cp_size) for s in stretches))
    filled = np.array([_filled([s for s in stretches if (s.kind, s.cp_size) == kind], edges) for kind in kinds])
    nothing = np.maximum(np.diff(edges) - filled.sum(axis=0), 0.0)
    owed = np.zeros(len(kinds) + 1)
    found: list[Stretch] = []
    for column, left, right in zip(np.vstack([filled, nothing]).T, edges[:-1], edges[1:], strict=True):
        owed += column
        place = int(owed.argmax())
        owed[place] -= right - left
        if place < len(kinds):
            _append(found, Stretch(*kinds[place], float(left), float(right)))
    return tuple(found)


def _append(found: list[Stretch], stretch: Stretch) -> None:
    """Add a stretch, or make the last one longer if it goes on."""
    last = found[-1] if found else None
    if last and (last.kind, last.cp_size, last.end_s) == (stretch.kind, stretch.cp_size, stretch.start_s):
        found[-1] = Stretch(last.kind, last.cp_size, last.start_s, stretch.end_s)
    else:
        found.append(stretch)


def _filled(stretches: Sequence[Stretch], edges: Array) -> Array:
    """Seconds of each bin that these stretches, none over another, fill."""
    times = np.array([time for s in stretches for time in (s.start_s, s.end_s)])
    lengths = np.array([length for s in stretches for length in (0.0, s.end_s - s.start_s)])
    return np.diff(np.interp(edges, times, np.cumsum(lengths)))
