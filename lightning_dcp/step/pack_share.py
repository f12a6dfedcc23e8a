"""What one rank holds of a pack, told by the segments of its samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from lightning_dcp.boundaries.budget import BoundaryBudget
from lightning_dcp.parallel.held import held_segments
from lightning_dcp.parallel.layout import PackLayout
from lightning_dcp.parallel.rank_times import PackShare
from lightning_dcp.schedule.plan import Pack
from lightning_dcp.segments import PLAIN, SampleSegments


def pack_share(
    number: int,
    pack: Pack,
    place: int,
    layout: PackLayout,
    *,
    sample_ids: Sequence[Any],
    segments: Sequence[SampleSegments] | None,
    budget: BoundaryBudget,
) -> PackShare:
    """One rank's part of a pack, in tokens of each kind.

    Args:
        number: of the pack, in the plan's order.
        pack: the pack.
        place: of the rank in its group.
        layout: of the pack.
        sample_ids: of its samples.
        segments: of its samples; None if they have none.
        budget: says which segments are dense.
    """
    kinds: Counter[str] = Counter()
    dense = 0
    for segment in () if segments is None else held_segments(layout, place, segments):
        kinds[segment.kind] += segment.num_tokens
        dense += segment.num_tokens if budget.is_dense(segment) else 0
    tokens = layout.tokens(place)
    if segments is not None and sum(kinds.values()) < tokens:
        kinds[PLAIN] += tokens - sum(kinds.values())
    ids = tuple(sample_ids)
    return PackShare(number, pack.first_rank, pack.cp_size, tokens, dense, ids, dict(kinds), layout.lengths)


def dense_tokens(layout: PackLayout, segments: Sequence[SampleSegments], budget: BoundaryBudget) -> list[float]:
    """Dense tokens of each rank's shard."""
    return [
        float(sum(s.num_tokens for s in held_segments(layout, place, segments) if budget.is_dense(s)))
        for place in range(layout.size)
    ]
