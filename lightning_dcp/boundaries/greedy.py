"""The plain greedy rule of cutting a sample into shards: the baseline of the budgeted layout."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_dcp.boundaries.budget import BoundaryBudget
from lightning_dcp.boundaries.pieces import PackSegments, pieces_of
from lightning_dcp.parallel.layout import PackLayout
from lightning_dcp.segments import SampleSegments, Segment


def build_context_shards(
    segments: Sequence[Segment],
    max_tokens: int = 8192,
    dense_limit: int = 2048,
    *,
    dense_from: float = BoundaryBudget.dense_from,
) -> list[SampleSegments]:
    """Walk the segments in order; start a new shard when its tokens or its dense tokens would overflow.

    No shard is empty, and no segment is cut: one that is larger than a budget by itself is a shard alone, over the budget.

    Args:
        segments: of one sample, ascending; or of several, one sample after the other.
        max_tokens: most tokens of a shard.
        dense_limit: most tokens of dense segments in a shard.
        dense_from: a segment of this density or more is dense.

    Returns:
        The segments of each shard, in order.

    Raises:
        ConfigurationError: budgets that are none.
    """
    budget = BoundaryBudget(max_tokens, dense_limit, dense_from)
    shards: list[list[Segment]] = []
    tokens = dense = 0
    for segment in segments:
        own = segment.num_tokens if budget.is_dense(segment) else 0
        if not shards or tokens + segment.num_tokens > max_tokens or dense + own > dense_limit:
            shards.append([])
            tokens = dense = 0
        shards[-1].append(segment)
        tokens += segment.num_tokens
        dense += own
    return [tuple(shard) for shard in shards]


def greedy(lengths: Sequence[int], size: int, segments: PackSegments, budget: BoundaryBudget) -> PackLayout:
    """The layout whose shards :func:`build_context_shards` makes of a pack, for comparison: it balances nothing.

    Shard k goes to rank ``k % size``, so a pack of more shards than ranks breaks the budgets.

    Args:
        lengths: tokens of each sample of the pack.
        size: ranks of the group.
        segments: of each sample; None: plain samples, each of which is one segment.
        budget: of a shard; a limit that is None is none.

    Raises:
        PlanError: segments of other samples.
    """
    pieces = pieces_of(lengths, segments, budget)
    whole = sum(lengths) or 1
    walked = [Segment(0, piece.num_tokens, density=piece.density) for piece in pieces]
    limits = budget.max_tokens or whole, budget.dense_limit or whole
    ranks: list[list[tuple[int, int, int]]] = [[] for _ in range(size)]
    rest = iter(pieces)
    for number, shard in enumerate(build_context_shards(walked, *limits, dense_from=budget.dense_from)):
        ranks[number % size] += [(piece.sample, piece.start, piece.end) for _, piece in zip(shard, rest, strict=False)]
    return PackLayout.from_chunks(lengths, ranks)
