"""Random packs with segments, for tests of boundaries."""

from hypothesis import strategies as st

from lightning_dcp.boundaries.budget import BoundaryBudget
from lightning_dcp.boundaries.pieces import Work, pieces_of, shard_loads
from lightning_dcp.schedule import preset
from lightning_dcp.segments import Segment

COST = preset("h100")


@st.composite
def samples(draw, longest=60, most=8):
    """Length and segments of one sample: neighbours, gaps, dense clusters."""
    segments, end = [], 0
    for _ in range(draw(st.integers(0, most))):
        start = end + draw(st.sampled_from([0, 0, 0, 3]))
        end = start + draw(st.integers(1, longest))
        density = draw(st.sampled_from([1.0, 1.0, 1.2, 1.5, 3.0]))
        segments.append(Segment(start, end, "tool" if density >= 1.5 else "user", density))
    return end + draw(st.integers(0 if end else 1, 20)), tuple(segments)


@st.composite
def packs(draw, most_samples=5, most_ranks=9, **options):
    """``(lengths, segments, size, budget)``: budgets from just enough for even shards to far more."""
    drawn = draw(st.lists(samples(**options), min_size=1, max_size=most_samples))
    lengths, segments = [length for length, _ in drawn], [own for _, own in drawn]
    size = draw(st.integers(1, most_ranks))
    factor = st.sampled_from([0.5, 1.0, 1.1, 1.5, 3.0])
    tokens = max(1, round(-(-sum(lengths) // size) * draw(factor)))
    dense = dense_tokens(segments)
    limit = draw(st.one_of(st.none(), st.just(max(1, round(-(-dense // size) * draw(factor))))))
    tolerance = draw(st.sampled_from([0.0, 0.05, 0.1]))
    return lengths, segments, size, BoundaryBudget(tokens, limit, tolerance=tolerance)


def dense_tokens(segments):
    return sum(s.num_tokens for own in segments for s in own if BoundaryBudget().is_dense(s))


def loads_of(layout, segments, budget, cost=COST):
    return shard_loads(layout, pieces_of(layout.lengths, segments, budget), Work.of(cost))


def chat(*turns):
    """A sample from ``(kind, tokens, density)``."""
    segments, start = [], 0
    for kind, tokens, density in turns:
        segments.append(Segment(start, start + tokens, kind, density))
        start += tokens
    return start, tuple(segments)
