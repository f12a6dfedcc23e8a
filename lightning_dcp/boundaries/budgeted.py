"""The budgeted layout: shards within their budgets, dense segments whole, work even."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from lightning_dcp.boundaries.budget import BoundaryBudget
from lightning_dcp.boundaries.fill import fill
from lightning_dcp.boundaries.pieces import ROUNDING, PackSegments, Piece, ShardLoad, Work, pieces_of, shard_loads
from lightning_dcp.boundaries.place import Cluster, clusters_of, place
from lightning_dcp.boundaries.shards import Limits, Shards
from lightning_dcp.errors import PlanError
from lightning_dcp.parallel.layout import PackLayout, zigzag
from lightning_dcp.schedule.cost import CostModel

CLUSTERS = (0.5, 0.25, 0.0)
"""How much of a shard neighbouring dense segments may make up together, one try after the other."""
GRAIN = 20
"""Ways whose heaviest shards differ by less than one part in so many are told apart by their chunks."""


@dataclass(frozen=True)
class Pack:
    """A pack to be cut.

    Attributes:
        lengths: tokens of each sample.
        size: ranks of the group.
        pieces: of the pack.
        limits: of a shard.
        budget: what was asked for.
        work: the measure.
    """

    lengths: Sequence[int]
    size: int
    pieces: list[Piece]
    limits: Limits
    budget: BoundaryBudget
    work: Work

    @cached_property
    def zigzag_loads(self) -> list[ShardLoad]:
        """What each rank would hold with zigzag."""
        return shard_loads(zigzag(self.lengths, self.size), self.pieces, self.work)

    @property
    def heaviest_of_zigzag_s(self) -> float:
        """Work of zigzag's heaviest shard."""
        return max(load.work_s for load in self.zigzag_loads)


def budgeted(
    lengths: Sequence[int],
    size: int,
    segments: PackSegments,
    budget: BoundaryBudget,
    cost: CostModel | None = None,
    *,
    preferred: Sequence[int] = (),
) -> PackLayout:
    """Cut a pack so that each shard keeps its budgets and all have about the same work.

    What comes first where not all can be had: the budget of tokens, that of dense tokens, balance (the heaviest shard has
    at most ``1 + tolerance`` times the work of zigzag's heaviest), dense segments on one rank, cuts on borders of segments,
    few chunks. A pack of more than ``size`` shards' tokens, or dense tokens, is shared out evenly: no shard is further over
    than it must be. Balance can be missed where both budgets are nearly full and leave no choice. :mod:`audit
    <lightning_dcp.boundaries.audit>` tells of each such case.

    Several ways are tried, from few chunks to many, until one keeps everything: dense segments go to ranks whole, heaviest
    first, and plain tokens fill up; or dense tokens are shared out evenly first. Only sums, products, quotients and square
    roots of floats in a fixed order: all machines cut alike. A pack without dense segments whose tokens fit is cut by
    :func:`~lightning_dcp.parallel.layout.zigzag`.

    Args:
        lengths: tokens of each sample of the pack.
        size: ranks of the group.
        segments: of each sample; None: plain samples.
        budget: of each shard. ``max_tokens=None`` is no limit: give ``budget.within(limit)`` for that of a plan.
        cost: how much linear layers and attention cost; None: a 7B model on H100s.
        preferred: ranks of the group for the shards of most dense tokens, densest first.

    Raises:
        PlanError: segments of other samples; preferred ranks that the group does not have.
    """
    if len(set(preferred)) != len(preferred) or not set(preferred) <= set(range(size)):
        raise PlanError(f"preferred ranks {tuple(preferred)} are no different ranks of a group of {size}")
    work, pieces = Work.of(cost), pieces_of(lengths, segments, budget)
    limits = Limits.of(pieces, size, budget, work)
    if size == 1 or not any(piece.dense for piece in pieces):
        return zigzag(lengths, size)  # no rank has more than an even share of the tokens
    layout, dense = _best(Pack(lengths, size, pieces, limits, budget, work))
    return _assigned(layout, dense, preferred)


def _best(pack: Pack) -> tuple[PackLayout, list[int]]:
    """The first way that keeps everything, or the one that keeps most; with the dense tokens of each shard."""
    found: list[tuple[tuple[float, ...], int, PackLayout, list[int]]] = []
    for number, (needed_for, attempt) in enumerate(_attempts(pack)):
        if any(not any(score[:needed_for]) for score, *_ in found):
            continue
        shards = attempt()
        if shards is None:
            continue
        layout = PackLayout.from_chunks(pack.lengths, shards.chunks)
        score = _score(pack, shards, layout)
        if not any(score[:4]):
            return layout, shards.dense
        found.append((score, number, layout, shards.dense))
    _, _, layout, dense = min(found, key=lambda way: way[:2])
    return layout, dense


def _score(pack: Pack, shards: Shards, layout: PackLayout) -> tuple[float, ...]:
    """How far a way is from keeping each rule, in the order of their importance; then its chunks."""
    heaviest, limits = max(shards.work_s), pack.limits
    uneven = heaviest > limits.goal_s * (1.0 + ROUNDING)
    over = 0.0
    if uneven:
        most = (1.0 + pack.budget.tolerance) * pack.heaviest_of_zigzag_s
        over = max(0.0, heaviest / most - 1.0 - ROUNDING)
    beyond = math.ceil(GRAIN * (heaviest / limits.goal_s - 1.0)) if uneven else 0
    chunks = sum(map(len, layout.ranks))
    return max(0, max(shards.dense) - limits.dense), over, _dense_cuts(pack, layout), beyond, chunks


def _attempts(pack: Pack) -> Iterator[tuple[int, Callable[[], Shards | None]]]:
    """Ways to cut a pack, each with how many entries of a score must be good for it to be needless.

    Those that would repeat an earlier one are left out.
    """
    clusters: list[Cluster] = []
    for share in CLUSTERS:
        before = len(clusters)
        clusters, plain = clusters_of(pack.pieces, pack.limits, share, pack.work)
        if len(clusters) != before:
            yield 4, partial(_placed, pack, clusters, plain)
    yield 3, partial(_placed, pack, clusters, plain, tightest=True)
    yield 3, partial(_shared_out, pack, strict=False)
    yield 2, partial(_shared_out, pack, strict=True)
    yield 2, partial(_zigzag, pack)


def _placed(
    pack: Pack, clusters: Sequence[Cluster], plain: Sequence[Piece], *, tightest: bool = False
) -> Shards | None:
    """Dense clusters whole, plain tokens around them."""
    shards = Shards(pack.size)
    if not place(shards, clusters, pack.limits, pack.work, tightest=tightest):
        return None
    _fill_up(pack, shards, plain)
    return shards


def _shared_out(pack: Pack, *, strict: bool) -> Shards:
    """Dense tokens evenly, cut at borders where that is no worse; plain tokens around them."""
    shards, limits = Shards(pack.size), pack.limits
    dense = [piece for piece in pack.pieces if piece.dense]
    slack = 0.0 if strict else limits.goal_s - limits.even_s
    fill(shards, dense, [limits.dense] * pack.size, slack, pack.work, strict=strict)
    _fill_up(pack, shards, [piece for piece in pack.pieces if not piece.dense], strict=strict)
    return shards


def _fill_up(pack: Pack, shards: Shards, plain: Sequence[Piece], *, strict: bool = False) -> None:
    limits = pack.limits
    rooms = [limits.tokens - held for held in shards.tokens]
    fill(shards, plain, rooms, 0.0 if strict else limits.goal_s - limits.even_s, pack.work, strict=strict)


def _zigzag(pack: Pack) -> Shards:
    """Zigzag's shards: what is left for packs of so few tokens, or budgets so full, that nothing else is even."""
    shards = Shards(pack.size)
    for rank, load in enumerate(pack.zigzag_loads):
        shards.add(rank, load.parts, pack.work)
    return shards


def _dense_cuts(pack: Pack, layout: PackLayout) -> int:
    """How many dense segments are cut that would fit on one rank."""
    ends = sorted((chunk.sample, chunk.end) for chunks in layout.ranks for chunk in chunks)
    cut = number = 0
    for piece in pack.pieces:
        while number < len(ends) and ends[number] <= (piece.sample, piece.start):
            number += 1
        inside = number < len(ends) and ends[number] < (piece.sample, piece.end)
        cut += inside and piece.dense and piece.num_tokens <= pack.limits.dense
    return cut


def _assigned(layout: PackLayout, dense: Sequence[int], preferred: Sequence[int]) -> PackLayout:
    """The same shards, those of most dense tokens on the preferred ranks."""
    if not preferred:
        return layout
    densest = sorted(range(layout.size), key=lambda rank: (-dense[rank], rank))
    places = [*preferred, *(rank for rank in range(layout.size) if rank not in preferred)]
    shard_of = dict(zip(places, densest, strict=True))
    return PackLayout(layout.lengths, tuple(layout.ranks[shard_of[rank]] for rank in range(layout.size)))
