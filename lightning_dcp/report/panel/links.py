"""The links between ranks: what a hop takes, over what it is expected to take."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_dcp.stability.record import LinkTime, StepRecord

SLOW_LINKS = 8
BAD_STEP = 0.95
"""Quantile over steps that is called a link's bad step."""


@dataclass(frozen=True)
class LinkCell:
    """One directed link over the run.

    Attributes:
        source: place of the sender.
        target: place of the receiver.
        typical_s: seconds of a hop, median over steps.
        expected_s: what they should be, median over steps; None if that is not known.
        ratio: typical over expected, median over steps; None if that is not known.
        bad_ratio: mean time of a step's hops over expected, in the worst 5 % of steps this or more.
        hops: messages in all steps; 0 for a link that was only tried.
        num_bytes: of all of them.
        held_up_s: seconds that the receiver was held up, all steps.
    """

    source: int
    target: int
    typical_s: float
    expected_s: float | None
    ratio: float | None
    bad_ratio: float | None
    hops: int
    num_bytes: int
    held_up_s: float


@dataclass(frozen=True)
class LinkMap:
    """All links that carried something.

    Attributes:
        ranks: of the plane.
        cells: by source and target.
        slowest: those of largest ``bad_ratio`` (or that held up longest, without expected times).
        steps: steps whose links were kept.
    """

    ranks: int
    cells: tuple[LinkCell, ...]
    slowest: tuple[LinkCell, ...]
    steps: int

    @property
    def has_expected(self) -> bool:
        """Whether any link's expected time is known."""
        return any(cell.ratio is not None for cell in self.cells)


def link_map(records: Sequence[StepRecord], ranks: int) -> LinkMap:
    """The links of a run.

    Args:
        records: its steps.
        ranks: of the plane.
    """
    used: dict[tuple[int, int], list[LinkTime]] = defaultdict(list)
    tried: dict[tuple[int, int], list[LinkTime]] = defaultdict(list)
    for record in records:
        for link in record.links:
            used[link.source, link.target].append(link)
        for link in record.probes:
            tried[link.source, link.target].append(link)
    pairs = sorted({*used, *tried})
    cells = tuple(_cell(used[pair], tried[pair]) for pair in pairs)
    size = max([ranks, *(1 + max(pair) for pair in pairs)])
    order = sorted(cells, key=lambda cell: (-(cell.bad_ratio or 0.0), -cell.held_up_s, cell.source, cell.target))
    return LinkMap(size, cells, tuple(order[:SLOW_LINKS]), sum(bool(record.links) for record in records))


def _cell(used: Sequence[LinkTime], tried: Sequence[LinkTime]) -> LinkCell:
    """A link's numbers; how slow it is, trials say as well as hops of packs do."""
    times = [*used, *tried]
    known = [time for time in times if time.expected_s > 0]
    ratios = [time.typical_s / time.expected_s for time in known]
    means = [time.transfer_s / (time.hops * time.expected_s) for time in known if time.hops]
    return LinkCell(
        times[0].source,
        times[0].target,
        float(np.median([time.typical_s for time in times])),
        float(np.median([time.expected_s for time in known])) if known else None,
        float(np.median(ratios)) if known else None,
        float(np.quantile(means, BAD_STEP)) if means else None,
        sum(time.hops for time in used),
        sum(time.num_bytes for time in used),
        sum(time.transfer_s for time in used),
    )
