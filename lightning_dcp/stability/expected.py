"""What the plan and the links lead one to expect of a step: seconds of each rank's work, and of each link's hops."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lightning_dcp.parallel.context import layout_of
from lightning_dcp.parallel.held import extra_tokens, held_segments
from lightning_dcp.parallel.hop_split import lower_quartile
from lightning_dcp.parallel.layout import LAYOUTS, PackLayout, zigzag
from lightning_dcp.parallel.link_table import LinkTable
from lightning_dcp.parallel.rank_times import LinkSummary
from lightning_dcp.schedule.cost import CostModel
from lightning_dcp.schedule.hardware import preset
from lightning_dcp.schedule.plan import Pack, StepPlan
from lightning_dcp.segments import SampleSegments

Parts = tuple[float, float, float, float]
"""Seconds of a rank's work: overhead of packs, what is linear in tokens, attention, and what tokens of other densities than
1 add to the linear part (below 0: take from it)."""


def work_parts(
    plan: StepPlan, layouts: Sequence[PackLayout | None] = (), segments: Sequence[SampleSegments] | None = None
) -> tuple[Parts, ...]:
    """What each rank of the plane computes, by the cost model that the plan was made with (or that of a 7B model).

    As :meth:`~lightning_dcp.schedule.cost.CostModel.pack_seconds`, without hops, dealt out as the tokens lie. Speeds of
    ranks are not in it: a slow rank's expected seconds are those of a sound one.

    Args:
        plan: of the batch.
        layouts: of each pack, in the plan's order; None where its name says it, and empty where that holds for all.
        segments: of each sample of the batch; None: plain samples.
    """
    model = plan.extra.get("cost_model")
    cost = preset("h100") if model is None else CostModel.from_dict(model, source="the plan's cost_model")
    by_rank: list[list[Parts]] = [[] for _ in range(plan.ranks)]
    for number, pack in enumerate(plan.packs()):
        lengths = pack.padded_lengths(plan.lengths, plan.alignment)
        layout = layouts[number] if layouts else None
        shares = _work_shares(pack, lengths, layout, cost)
        extras = _extras(pack, lengths, layout, segments)
        for rank, (tokens, attention), extra in zip(pack.ranks, shares, extras, strict=True):
            by_rank[rank].append((cost.pack_overhead, cost.linear * tokens, attention, cost.linear * extra))
    return tuple(_sums(parts) for parts in by_rank)


def _sums(parts: Sequence[Parts]) -> Parts:
    overhead, linear, attention, extra = (math.fsum([part[kind] for part in parts]) for kind in range(4))
    return overhead, linear, attention, extra


def _work_shares(
    pack: Pack, lengths: tuple[int, ...], layout: PackLayout | None, cost: CostModel
) -> list[tuple[float, float]]:
    """Tokens, and seconds of attention, of each rank of a pack's group."""
    size = pack.cp_size
    attention = cost.attention_seconds(lengths, size).tolist()
    if layout is None and (size == 1 or LAYOUTS.get(pack.layout) is zigzag):
        return [(sum(lengths) / size, math.fsum(attention))] * size  # even, so that no layout need be made
    layout = layout or layout_of(pack.layout, lengths, size)
    weights = [size * seconds / (length * length) for seconds, length in zip(attention, lengths, strict=True)]
    return [(layout.tokens(place), layout.causal_work(place, weights)) for place in range(size)]


def _extras(
    pack: Pack,
    lengths: tuple[int, ...],
    layout: PackLayout | None,
    segments: Sequence[SampleSegments] | None,
) -> list[float]:
    """What the densities of segments add to the tokens of each rank of a pack's group."""
    own = [] if segments is None else [tuple(s for s in segments[n] if s.density != 1) for n in pack.samples]
    if not any(own):
        return [0.0] * pack.cp_size
    if pack.cp_size == 1:
        return [extra_tokens([segment for sample in own for segment in sample])]
    layout = layout or layout_of(pack.layout, lengths, pack.cp_size)
    return [extra_tokens(held_segments(layout, place, own)) for place in range(pack.cp_size)]


class HopExpectation:
    """How long a hop should take: by the table of links, or by what other links needed lately.

    Without a table the plane's own hops tell. What a link is seen to take can be longer than it needs, never shorter, so
    the lower quartile over the other links and the last steps is looked up for each size of message, and of all sizes the
    one that says least is taken: a larger message takes no less than a smaller one, and at most as many times as long as it
    is larger.

    Args:
        table: measured, or None.
        window: steps that are remembered.
    """

    def __init__(self, table: LinkTable | None, window: int) -> None:
        self._table = table
        self._seen: deque[NDArray[np.float64]] = deque(maxlen=window)
        self._by_size: dict[int, NDArray[np.float64]] = {}

    def see(self, links: Sequence[LinkSummary]) -> None:
        """Take in the hops of one step."""
        if self._table is not None:
            return
        rows = [(_size_class(k.num_bytes / k.hops), k.source, k.target, k.fastest_s) for k in links]
        self._seen.append(np.array(rows, dtype=np.float64).reshape(-1, 4))
        every = np.concatenate(self._seen)
        self._by_size = {int(size): every[every[:, 0] == size, 1:] for size in np.unique(every[:, 0])}

    def seconds(self, source: int, target: int, num_bytes: float) -> float:
        """Seconds of a hop of so many bytes; 0.0 if nothing is known."""
        if self._table is not None:
            return self._table.seconds(source, target, num_bytes)
        found = []
        for size, seen in self._by_size.items():
            others = seen[(seen[:, 0] != source) | (seen[:, 1] != target), 2]
            if len(others):  # one step of one other link is not much to go by, but better than nothing
                found.append(lower_quartile(others) * max(1.0, num_bytes / (1 << size)))
        return min(found, default=0.0)


def _size_class(num_bytes: float) -> int:
    """n for messages of 2^n bytes or more, up to 2^(n + 1)."""
    return max(1, int(num_bytes)).bit_length() - 1
