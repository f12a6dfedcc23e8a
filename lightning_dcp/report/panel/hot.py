"""Samples and kinds of segments that make the tail: those on the critical ranks of slow steps."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from lightning_dcp.report.panel.late import late_excess
from lightning_dcp.stability.hot import by_kind, by_sample, critical_rank, excess_seconds
from lightning_dcp.stability.record import PackTime, StepRecord

MOST_SAMPLES = 20
MOST_STEPS = 8


@dataclass(frozen=True)
class HotSample:
    """One sample.

    Attributes:
        sample: its id, as text.
        excess_s: seconds over the median step that are owed to it.
        times: slow steps that it was part of, on the critical rank.
        steps: their numbers, the first ones.
        cp_sizes: of its packs.
        kinds: of its packs' segments, those of most tokens first.
    """

    sample: str
    excess_s: float
    times: int
    steps: tuple[int, ...]
    cp_sizes: tuple[int, ...]
    kinds: tuple[str, ...]


@dataclass(frozen=True)
class HotList:
    """The samples that cost most.

    Attributes:
        samples: most seconds first.
        kinds: of segments: seconds owed to each, most first; empty if samples had no segments.
        steps: slow steps whose packs were kept; only these count.
    """

    samples: tuple[HotSample, ...]
    kinds: tuple[tuple[str, float], ...]
    steps: int


def hot_list(records: Sequence[StepRecord], median_s: float) -> HotList:
    """What slow steps took over the median, shared as :mod:`lightning_dcp.stability.hot` says.

    Steps that were slow because a rank began late are nobody's fault among the samples, and left out.

    Args:
        records: of the run.
        median_s: of its step times, seconds.
    """
    owed: dict[Hashable, float] = defaultdict(float)
    kinds: dict[str, float] = defaultdict(float)
    seen: dict[Hashable, list[tuple[int, PackTime]]] = defaultdict(list)
    slow = 0
    for record, late_s in zip(records, late_excess(records).tolist(), strict=True):
        excess_s, rank = excess_seconds(record, median_s), critical_rank(record)
        if not excess_s or late_s >= excess_s / 2:
            continue
        own = [_with_text(pack) for pack in record.packs if pack.rank == rank]
        if not own:
            continue
        slow += 1
        for sample, seconds in by_sample(own, excess_s).items():
            owed[sample] += seconds
        for pack in own:
            for sample in pack.sample_ids:
                seen[sample].append((record.step, pack))
        if any(pack.tokens_by_kind for pack in own):
            for kind, seconds in by_kind(own, excess_s).items():
                kinds[kind] += seconds
    hottest = sorted(owed, key=lambda sample: (-owed[sample], str(sample)))[:MOST_SAMPLES]
    return HotList(
        tuple(_sample(str(sample), owed[sample], seen[sample]) for sample in hottest),
        tuple(sorted(kinds.items(), key=lambda item: (-item[1], item[0]))),
        slow,
    )


def _with_text(pack: PackTime) -> PackTime:
    """The same with ids as text: read from a file, some are lists."""
    return replace(pack, sample_ids=tuple(map(str, pack.sample_ids)))


def _sample(sample: str, excess_s: float, seen: Sequence[tuple[int, PackTime]]) -> HotSample:
    kinds: Counter[str] = Counter()
    for _, pack in seen:
        kinds.update(pack.tokens_by_kind)
    steps = sorted({step for step, _ in seen})
    return HotSample(
        sample,
        excess_s,
        len(steps),
        tuple(steps[:MOST_STEPS]),
        tuple(sorted({pack.cp_size for _, pack in seen})),
        tuple(kind for kind, _ in kinds.most_common(3)),
    )
