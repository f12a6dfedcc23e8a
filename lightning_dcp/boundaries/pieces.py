"""A pack as pieces that a rank can take whole, and what the work on a piece is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from lightning_dcp.boundaries.budget import BoundaryBudget
from lightning_dcp.errors import PlanError
from lightning_dcp.parallel.layout import PackLayout
from lightning_dcp.schedule.cost import CostModel
from lightning_dcp.schedule.hardware import preset
from lightning_dcp.segments import SampleSegments, covering

ROUNDING = 1e-9
"""Part by which sums of the same work in another order may differ."""
PackSegments = Sequence[SampleSegments] | None
"""The segments of each sample of a pack or of a batch; None: plain samples."""


class Piece(NamedTuple):
    """Tokens ``start .. end - 1`` of one sample of a pack, all of one segment.

    Attributes:
        sample: place in the pack.
        start: first token.
        end: the token after the last.
        density: of its segment.
        dense: whether its tokens count as dense.
        segment: place of its segment among those of the sample; -1: tokens that no segment names.
    """

    sample: int
    start: int
    end: int
    density: float
    dense: bool
    segment: int

    @property
    def num_tokens(self) -> int:
        """Tokens that it holds."""
        return self.end - self.start


def pieces_of(lengths: Sequence[int], segments: PackSegments, budget: BoundaryBudget) -> list[Piece]:
    """Every segment of a pack, and the tokens between them, in the pack's order.

    Raises:
        PlanError: segments of another number of samples, or beyond a sample's end.
    """
    given: Sequence[SampleSegments] = ((),) * len(lengths) if segments is None else segments
    if len(given) != len(lengths):
        raise PlanError(f"segments of {len(given)} sample(s) for a pack of {len(lengths)}")
    pieces = []
    for sample, (length, own) in enumerate(zip(lengths, given, strict=True)):
        if own and own[-1].end > length:
            raise PlanError(
                f"sample {sample} of the pack has {length} tokens, and a segment that ends at {own[-1].end}"
            )
        places = {segment.start: place for place, segment in enumerate(own)}
        pieces += [
            Piece(sample, s.start, s.end, s.density, budget.is_dense(s), places.get(s.start, -1))
            for s in covering(own, length)
        ]
    return pieces


@dataclass(frozen=True)
class Work:
    """The measure by which shards are balanced, in seconds of forward and backward over a whole group.

    Tokens a .. b - 1 of a sample cost ``linear * density * (b - a) + attention * (b^2 - a^2)``: the first is the cost
    model's linear part, dearer where tokens are denser; the second its causal attention, whose sum over the chunks of a
    sample of L tokens is ``attention * L^2``. Only sums and products of floats, so that all machines cut alike.

    Attributes:
        linear: seconds a token of density 1.
        attention: seconds a token^2.
    """

    linear: float
    attention: float

    @classmethod
    def of(cls, cost: CostModel | None) -> Work:
        """By a cost model; None: that of a 7B model on H100s, as the dynamic scheduler has it."""
        chosen = default_cost() if cost is None else cost
        return cls(chosen.linear, chosen.attention)

    def seconds(self, start: int, end: int, density: float) -> float:
        """Work on some tokens of one piece."""
        return self.linear * density * (end - start) + self.attention * (end * end - start * start)

    def of_piece(self, piece: Piece) -> float:
        """Work on a whole piece."""
        return self.seconds(piece.start, piece.end, piece.density)


@lru_cache(maxsize=1)
def default_cost() -> CostModel:
    """What packs cost where nothing is said of it: a 7B model on H100s, as the dynamic scheduler has it."""
    return preset("h100")


@dataclass(frozen=True)
class ShardLoad:
    """What one rank holds of a pack.

    Attributes:
        tokens: all of them.
        dense_tokens: those of dense segments.
        work_s: seconds of :class:`Work`.
        parts: the tokens of each segment, or between segments, that lie on this rank, in the pack's order.
    """

    tokens: int
    dense_tokens: int
    work_s: float
    parts: tuple[Piece, ...]


def shard_loads(layout: PackLayout, pieces: Sequence[Piece], work: Work) -> list[ShardLoad]:
    """What each rank of a layout holds.

    Args:
        layout: of the pack.
        pieces: the pack's, from :func:`pieces_of`.
        work: the measure.
    """
    by_sample: list[list[Piece]] = [[] for _ in layout.lengths]
    for piece in pieces:
        by_sample[piece.sample].append(piece)
    parts: list[list[Piece]] = [[] for _ in layout.ranks]
    chunks = sorted(
        (chunk.sample, chunk.start, chunk.end, rank) for rank, held in enumerate(layout.ranks) for chunk in held
    )
    sample, number = -1, 0
    for chunk_sample, start, end, rank in chunks:
        if chunk_sample != sample:
            sample, number = chunk_sample, 0
        own = by_sample[sample]
        while number < len(own) and own[number].start < end:
            piece = own[number]
            parts[rank].append(piece._replace(start=max(piece.start, start), end=min(piece.end, end)))
            if piece.end > end:
                break
            number += 1
    return [_load(held, work) for held in parts]


def _load(parts: Sequence[Piece], work: Work) -> ShardLoad:
    tokens = sum([part.num_tokens for part in parts])
    dense = sum([part.num_tokens for part in parts if part.dense])
    return ShardLoad(tokens, dense, math.fsum([work.of_piece(part) for part in parts]), tuple(parts))
