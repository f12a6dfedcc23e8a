"""What one rank holds of a pack, told by the segments of its samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from lightning_dcp.boundaries.budget import BoundaryBudget
from lightning_dcp.parallel.layout import PackLayout
from lightning_dcp.parallel.rank_times import PackShare
from lightning_dcp.schedule.plan import Pack
from lightning_dcp.segments import SampleSegments, Segment, covering, cut


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
    held = [] if segments is None else held_segments(layout, place, segments)
    kinds: Counter[str] = Counter()
    for segment in held:
        kinds[segment.kind] += segment.num_tokens
    dense = sum(segment.num_tokens for segment in held if budget.is_dense(segment))
    tokens = layout.tokens(place)
    ids = tuple(sample_ids)
    return PackShare(number, pack.first_rank, pack.cp_size, tokens, dense, ids, dict(kinds), layout.lengths)


def held_segments(layout: PackLayout, place: int, segments: Sequence[SampleSegments]) -> list[Segment]:
    """The parts of segments that a rank of a group holds, plain tokens between them as segments of their own."""
    lengths = layout.lengths
    return [
        part
        for chunk in layout.ranks[place]
        for part in cut(covering(segments[chunk.sample], lengths[chunk.sample]), chunk.start, chunk.end)
    ]


def dense_tokens(layout: PackLayout, segments: Sequence[SampleSegments], budget: BoundaryBudget) -> list[float]:
    """Dense tokens of each rank's shard."""
    return [
        float(sum(s.num_tokens for s in held_segments(layout, place, segments) if budget.is_dense(s)))
        for place in range(layout.size)
    ]
