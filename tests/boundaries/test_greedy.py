"""The plain greedy rule, and the layout that it makes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_dcp.boundaries.budget import BoundaryBudget
from lightning_dcp.boundaries.greedy import build_context_shards, greedy
from lightning_dcp.errors import ConfigurationError
from lightning_dcp.segments import Segment
from tests.boundaries.support import packs, samples


def test_a_new_shard_starts_when_tokens_or_dense_tokens_would_overflow():
    a, b, c, d, e = (
        Segment(0, 60),
        Segment(60, 100),
        Segment(100, 110, "tool", 2.0),
        Segment(110, 130, "tool", 2.0),
        Segment(130, 131),
    )
    assert build_context_shards([a, b, c, d, e], 100, 25) == [(a, b), (c,), (d, e)]
    assert build_context_shards([a, b, c, d, e], 131, 30) == [(a, b, c, d, e)]
    assert build_context_shards([a, b, c, d, e], 100, 25, dense_from=3.0) == [(a, b), (c, d, e)]


def test_a_segment_over_a_budget_is_a_shard_alone_and_no_shard_is_empty():
    long, tool = Segment(0, 9000), Segment(9000, 12000, "tool", 3.0)
    assert build_context_shards([long, tool, Segment(12000, 12001)]) == [(long,), (tool,), (Segment(12000, 12001),)]
    assert build_context_shards([]) == []


def test_the_limits_are_those_of_the_rule_and_are_checked():
    parts = [Segment(i * 4096, (i + 1) * 4096) for i in range(4)]
    assert build_context_shards(parts) == [tuple(parts[:2]), tuple(parts[2:])]
    with pytest.raises(ConfigurationError, match="dense_limit"):
        build_context_shards(parts, 100, 0)


@given(samples(), st.integers(1, 80), st.integers(1, 80))
def test_every_segment_is_in_one_shard_in_order(sample, max_tokens, dense_limit):
    _, segments = sample
    shards = build_context_shards(segments, max_tokens, dense_limit)
    assert [segment for shard in shards for segment in shard] == list(segments)
    budget = BoundaryBudget(max_tokens, dense_limit)
    for before, shard in zip([None, *shards], shards, strict=False):
        assert shard
        tokens = sum(s.num_tokens for s in shard)
        dense = sum(s.num_tokens for s in shard if budget.is_dense(s))
        assert len(shard) == 1 or (tokens <= max_tokens and dense <= dense_limit)
        if before:  # it had no room for the next segment
            more = shard[0].num_tokens
            full = sum(s.num_tokens for s in before) + more > max_tokens
            dense_together = sum(s.num_tokens for s in (*before, shard[0]) if budget.is_dense(s))
            assert full or dense_together > dense_limit


@given(packs())
def test_the_layout_holds_each_token_once_and_no_segment_is_cut(pack):
    lengths, segments, size, budget = pack
    layout = greedy(lengths, size, segments, budget)
    layout.validate()
    assert layout.size == size
    borders = {(s, end) for s, own in enumerate(segments) for segment in own for end in segment[:2]}
    borders |= {(s, end) for s, length in enumerate(lengths) for end in (0, length)}
    assert all((c.sample, end) in borders for chunks in layout.ranks for c in chunks for end in (c.start, c.end))
