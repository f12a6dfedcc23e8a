"""Dense segments go to ranks whole, the heaviest first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import groupby
from operator import attrgetter

from lightning_dcp.boundaries.pieces import Piece, Work
from lightning_dcp.boundaries.shards import Limits, Shards


@dataclass(frozen=True)
class Cluster:
    """Neighbouring pieces of one sample that go to one rank together: dense ones, and short plain ones between them."""

    pieces: tuple[Piece, ...]
    tokens: int
    dense: int
    work_s: float

    @classmethod
    def of(cls, piece: Piece, work: Work) -> Cluster:
        """The cluster of one piece."""
        return cls((piece,), piece.num_tokens, piece.num_tokens if piece.dense else 0, work.of_piece(piece))

    def is_within(self, most: tuple[float, float, float]) -> bool:
        """Whether it has no more than so many tokens, dense tokens and seconds of work."""
        return self.tokens <= most[0] and self.dense <= most[1] and self.work_s <= most[2]

    def joined(self, others: Sequence[Cluster]) -> Cluster:
        """The cluster of this one's pieces and of those that follow it."""
        return Cluster(
            (*self.pieces, *[piece for other in others for piece in other.pieces]),
            self.tokens + sum([other.tokens for other in others]),
            self.dense + sum([other.dense for other in others]),
            math.fsum([self.work_s, *(other.work_s for other in others)]),
        )


def clusters_of(pieces: Sequence[Piece], limits: Limits, share: float, work: Work) -> tuple[list[Cluster], list[Piece]]:
    """Dense segments, with their neighbours up to a share of what a shard holds; and the plain pieces left over.

    A sample with dense segments that is no more than that is one cluster. The fewer clusters, the fewer chunks a rank has;
    the larger they are, the harder they are to balance.

    Args:
        pieces: of the pack, in its order.
        limits: of a shard.
        share: most of a shard's budgets and of its even work that a cluster of several pieces takes, 0 to 1.
        work: the measure.
    """
    most = share * limits.tokens, share * limits.dense, share * limits.even_s
    clusters: list[Cluster] = []
    plain: list[Piece] = []
    for _, own in groupby(pieces, key=attrgetter("sample")):
        single = [Cluster.of(piece, work) for piece in own]
        if sum([one.tokens for one in single]) <= most[0] and any(one.dense for one in single):
            whole = single[0].joined(single[1:])
            if whole.is_within(most):
                clusters.append(whole)
                continue
        _cluster(single, most, clusters, plain)
    return clusters, plain


def _cluster(
    single: Sequence[Cluster], most: tuple[float, float, float], clusters: list[Cluster], plain: list[Piece]
) -> None:
    """The clusters of one sample, from those of its single pieces, and the plain pieces between them."""
    between: list[Cluster] = []  # plain pieces since the last cluster, which may still become part of it
    last: Cluster | None = None
    for own in single:
        if not own.dense:
            between.append(own)
            continue
        joined = None if last is None else last.joined([*between, own])
        if joined is not None and joined.is_within(most):
            clusters[-1] = joined
        else:
            plain += [only.pieces[0] for only in between]
            clusters.append(own)
        last, between = clusters[-1], []
    plain += [only.pieces[0] for only in between]


def place(shards: Shards, clusters: Sequence[Cluster], limits: Limits, work: Work, *, tightest: bool = False) -> bool:
    """Each cluster, heaviest first, to the rank of least work that has room for it; those that fit nowhere are cut.

    Args:
        shards: is filled.
        clusters: what to place.
        limits: of a shard.
        work: the measure.
        tightest: most dense tokens first, to the rank with the least room for them that is enough: so the fewest segments
            find no rank with room for all of them.

    Returns:
        Whether there was room for all: always where clusters hold dense tokens only.
    """

    def key(rank: int) -> float:
        return limits.dense - shards.dense[rank] if tightest else shards.work_s[rank]

    ready = [(key(rank), rank) for rank in range(shards.size)]
    for cluster in sorted(clusters, key=lambda c: (-(c.dense if tightest else c.work_s), c.pieces[0])):
        rank = _take(ready, shards, cluster, limits)
        if rank is not None:
            shards.add(rank, cluster.pieces, work)
            heappush(ready, (key(rank), rank))
            continue
        if not all(_place_piece(shards, piece, limits, work) for piece in cluster.pieces):
            return False
        ready = [(key(rank), rank) for rank in range(shards.size)]
        heapify(ready)
    return True


def _take(ready: list[tuple[float, int]], shards: Shards, cluster: Cluster, limits: Limits) -> int | None:
    """The first rank of the heap that has room for a cluster, taken off it."""
    full = []
    found = None
    while ready:
        entry = heappop(ready)
        if _has_room(shards, entry[1], cluster, limits):
            found = entry[1]
            break
        full.append(entry)
    for entry in full:
        heappush(ready, entry)
    return found


def _has_room(shards: Shards, rank: int, cluster: Cluster, limits: Limits) -> bool:
    fits = shards.tokens[rank] + cluster.tokens <= limits.tokens
    return fits and shards.dense[rank] + cluster.dense <= limits.dense


def _place_piece(shards: Shards, piece: Piece, limits: Limits, work: Work) -> bool:
    """One piece of a cluster that fits nowhere: whole if it can be, else in few parts to the ranks with most room."""
    own = Cluster.of(piece, work)
    fitting = [rank for rank in range(shards.size) if _has_room(shards, rank, own, limits)]
    if fitting:
        shards.add(min(fitting, key=lambda rank: (shards.work_s[rank], rank)), [piece], work)
        return True
    start = piece.start
    while start < piece.end:
        rooms = [_room(shards, rank, piece, limits) for rank in range(shards.size)]
        rank = max(range(shards.size), key=lambda r: (rooms[r], -shards.work_s[r], -r))
        if not rooms[rank]:
            return False
        end = min(piece.end, start + rooms[rank])
        shards.add(rank, [piece._replace(start=start, end=end)], work)
        start = end
    return True


def _room(shards: Shards, rank: int, piece: Piece, limits: Limits) -> int:
    room = limits.tokens - shards.tokens[rank]
    return min(room, limits.dense - shards.dense[rank]) if piece.dense else room
