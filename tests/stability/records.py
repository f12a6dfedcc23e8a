"""Made-up records of steps."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from lightning_dcp.stability.record import LinkTime, RankTime, StepRecord

RING = ((0, 1), (1, 2), (2, 3), (3, 0))
Parts = tuple[float, float, float]


def link_time(source: int, target: int, typical: float, *, expected: float = 1e-3, hops: int = 4) -> LinkTime:
    """A link whose hops all took the same."""
    return LinkTime(source, target, hops, 1000 * hops, typical * hops, typical, expected)


def rank_time(rank: int, busy: float, parts: Sequence[float], queued: float = 0.0) -> RankTime:
    """A rank with this work."""
    return RankTime(rank, busy, 0.0, 0.0, sum(parts), 0, tuple(parts), queued)


def uneven(seed: int, ranks: int = 4) -> list[Parts]:
    """Work of ranks that differs by an order of magnitude, and in kind."""
    draw = random.Random(seed)
    return [
        (0.001 * draw.randint(1, 8), 0.01 * 10 ** draw.uniform(-1, 1), 0.01 * 10 ** draw.uniform(-1, 1))
        for _ in range(ranks)
    ]


def record(
    step: int,
    links: Mapping[tuple[int, int], float] | None = None,
    ranks: Sequence[RankTime] | None = None,
    probes: Mapping[tuple[int, int], float] | None = None,
) -> StepRecord:
    """A step with these typical seconds of links (by default all sound), these ranks (by default all alike), and tries."""
    typical = dict.fromkeys(RING, 0.5e-3) if links is None else links
    return StepRecord(
        step,
        0.1,
        100,
        None,
        tuple(ranks) if ranks is not None else tuple(rank_time(r, 0.1, (0.01, 0.05, 0.04)) for r in range(4)),
        tuple(link_time(*link, seconds) for link, seconds in sorted(typical.items())),
        probes=tuple(link_time(*link, seconds) for link, seconds in sorted((probes or {}).items())),
    )
