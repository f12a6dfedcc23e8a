"""The shards of a pack while they are filled."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from lightning_dcp.boundaries.budget import BoundaryBudget
from lightning_dcp.boundaries.pieces import Piece, Work


@dataclass(frozen=True)
class Limits:
    """What a shard may hold, raised to what the pack needs if all its shards were even.

    Attributes:
        tokens: most tokens.
        dense: most dense tokens, never over ``tokens``.
        even_s: work of a shard if all had the same.
        goal_s: most work of a shard that is good without a look at zigzag.
    """

    tokens: int
    dense: int
    even_s: float
    goal_s: float

    @classmethod
    def of(cls, pieces: Sequence[Piece], size: int, budget: BoundaryBudget, work: Work) -> Limits:
        """The limits of a pack's shards on ``size`` ranks."""
        tokens = sum([piece.num_tokens for piece in pieces])
        dense = sum([piece.num_tokens for piece in pieces if piece.dense])
        most = max(tokens if budget.max_tokens is None else budget.max_tokens, -(-tokens // size))
        most_dense = max(most if budget.dense_limit is None else budget.dense_limit, -(-dense // size))
        even = math.fsum([work.of_piece(piece) for piece in pieces]) / size
        return cls(most, min(most, most_dense), even, (1.0 + budget.tolerance) * even)


@dataclass
class Shards:
    """What each rank holds so far.

    Attributes:
        size: ranks of the group.
        tokens: of each rank.
        dense: dense tokens of each rank.
        work_s: of each rank.
        chunks: ``(sample, start, end)`` of each rank, in any order.
    """

    size: int
    tokens: list[int] = field(init=False)
    dense: list[int] = field(init=False)
    work_s: list[float] = field(init=False)
    chunks: list[list[tuple[int, int, int]]] = field(init=False)

    def __post_init__(self) -> None:
        self.tokens, self.dense, self.work_s = [0] * self.size, [0] * self.size, [0.0] * self.size
        self.chunks = [[] for _ in range(self.size)]

    def add(self, rank: int, pieces: Iterable[Piece], work: Work) -> None:
        """Give pieces to a rank."""
        for piece in pieces:
            self.tokens[rank] += piece.num_tokens
            self.dense[rank] += piece.num_tokens if piece.dense else 0
            self.work_s[rank] += work.of_piece(piece)
            self.chunks[rank].append((piece.sample, piece.start, piece.end))
