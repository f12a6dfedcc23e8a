"""What a rank holds of a pack, in tokens of each kind."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lightning_dcp.boundaries.budget import BoundaryBudget
from lightning_dcp.parallel.layout import PackLayout, zigzag
from lightning_dcp.schedule.plan import Pack
from lightning_dcp.segments import Segment
from lightning_dcp.step.pack_share import dense_tokens, pack_share

BUDGET = BoundaryBudget(dense_from=1.5)


def share(
    layout: PackLayout, place: int, segments: list[tuple[Segment, ...]] | None
) -> tuple[int, int, dict[str, int]]:
    pack = Pack(4, layout.size, tuple(range(len(layout.lengths))))
    found = pack_share(7, pack, place, layout, sample_ids=["a"], segments=segments, budget=BUDGET)
    assert (found.number, found.first_rank, found.cp_size, found.sample_tokens) == (7, 4, layout.size, layout.lengths)
    return found.tokens, found.dense_tokens, found.tokens_by_kind


def test_tokens_that_no_segment_names_are_text() -> None:
    layout = PackLayout.from_chunks([10], [[(0, 0, 3), (0, 8, 10)], [(0, 3, 8)]])
    segments = [(Segment(1, 5, "tool", 2.0), Segment(5, 9, "user"))]
    assert share(layout, 0, segments) == (5, 2, {"tool": 2, "user": 1, "text": 2})
    assert share(layout, 1, segments) == (5, 2, {"tool": 2, "user": 3})
    assert share(layout, 0, None) == (5, 0, {})
    assert dense_tokens(layout, segments, BUDGET) == [2.0, 2.0]


@given(
    st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=12), min_size=1, max_size=4),
    st.sampled_from([1, 2, 3, 4]),
)
def test_all_ranks_together_hold_each_token_once(parts: list[list[int]], size: int) -> None:
    """Every second part of a sample is a segment, every third of these dense."""
    lengths = [sum(sample) for sample in parts]
    segments, names = [], {}
    for sample in parts:
        starts = [sum(sample[:n]) for n in range(len(sample))]
        kinds = [
            (n, start, start + length) for n, (start, length) in enumerate(zip(starts, sample, strict=True)) if n % 2
        ]
        segments.append(tuple(Segment(a, b, f"kind {n}", 2.0 if n % 3 == 0 else 1.0) for n, a, b in kinds))
    for own in segments:
        for segment in own:
            names[segment.kind] = names.get(segment.kind, 0) + segment.num_tokens
    layout = zigzag(lengths, size)
    found = [share(layout, place, segments) for place in range(size)]
    for name, count in names.items():
        assert sum(kinds.get(name, 0) for _, _, kinds in found) == count
    assert all(sum(kinds.values()) == tokens for tokens, _, kinds in found)
    assert [float(dense) for _, dense, _ in found] == dense_tokens(layout, segments, BUDGET)
    assert sum(dense for _, dense, _ in found) == sum(s.num_tokens for own in segments for s in own if s.density > 1.5)
