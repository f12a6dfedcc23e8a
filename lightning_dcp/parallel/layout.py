"""How the tokens of a pack lie on the ranks of its group: index maths only, no communication."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from lightning_dcp.errors import PlanError


@dataclass(frozen=True)
class Chunk:
    """Tokens ``start .. end - 1`` of one sample of the pack."""

    sample: int
    start: int
    end: int

    def __len__(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class PackLayout:
    """The chunks of each rank of a group; together they hold each token of the pack once.

    Attributes:
        lengths: tokens of each sample of the pack.
        ranks: for each rank its chunks, ascending by sample and start; they need not be of equal size.
    """

    lengths: tuple[int, ...]
    ranks: tuple[tuple[Chunk, ...], ...]

    @classmethod
    def from_chunks(cls, lengths: Sequence[int], ranks: Sequence[Iterable[tuple[int, int, int]]]) -> PackLayout:
        """A layout from any list of ``(sample, start, end)`` for each rank, in any order.

        Raises:
            PlanError: a token that is held by no rank or by several.
        """
        found: list[list[Chunk]] = [[] for _ in ranks]
        for chunks, given in zip(found, ranks, strict=True):
            for sample, start, end in sorted(given):
                _append(chunks, Chunk(sample, start, end))
        layout = cls(tuple(lengths), tuple(map(tuple, found)))
        layout.validate()
        return layout

    @property
    def size(self) -> int:
        """Ranks of the group."""
        return len(self.ranks)

    @property
    def num_tokens(self) -> int:
        """Tokens of the pack."""
        return sum(self.lengths)

    def tokens(self, rank: int) -> int:
        """Tokens that a rank holds."""
        return sum(len(chunk) for chunk in self.ranks[rank])

    def causal_work(self, rank: int, weights: Sequence[float]) -> float:
        """Causal attention of a rank's chunks: tokens a .. b - 1 see about ``(b^2 - a^2) / 2`` pairs, half of it left out.

        Args:
            rank: place in the group.
            weights: of each sample.
        """
        return math.fsum([weights[c.sample] * (c.end * c.end - c.start * c.start) for c in self.ranks[rank]])

    @cached_property
    def _sample_starts(self) -> list[int]:
        return [0, *accumulate(self.lengths)]

    def pack_index(self, rank: int) -> Tensor:
        """Where each local token of a rank lies in the pack, int64 ``[tokens(rank)]``; worked out once."""
        if rank not in self._pack_indices:
            starts = self._sample_starts
            spans = [np.arange(starts[c.sample] + c.start, starts[c.sample] + c.end) for c in self.ranks[rank]]
            self._pack_indices[rank] = torch.from_numpy(np.concatenate([np.empty(0, dtype=np.int64), *spans]))
        return self._pack_indices[rank]

    @cached_property
    def _pack_indices(self) -> dict[int, Tensor]:
        return {}

    def positions(self, rank: int) -> Tensor:
        """Position of each local token in its own sample, int64 ``[tokens(rank)]``."""
        spans = [np.arange(c.start, c.end) for c in self.ranks[rank]]
        return torch.from_numpy(np.concatenate([np.empty(0, dtype=np.int64), *spans]))

    def without_padding(self, lengths: Sequence[int]) -> PackLayout:
        """The layout of the first tokens of each sample, each on the rank that holds it here.

        Args:
            lengths: tokens of each sample without the padding at its end.

        Raises:
            PlanError: other samples, or longer ones.
        """
        if len(lengths) != len(self.lengths) or any(n > m for n, m in zip(lengths, self.lengths, strict=True)):
            raise PlanError(
                f"samples of {tuple(lengths)} tokens without padding are not those of {self.lengths} with it"
            )
        ranks = tuple(
            tuple(
                Chunk(c.sample, c.start, min(c.end, lengths[c.sample])) for c in chunks if c.start < lengths[c.sample]
            )
            for chunks in self.ranks
        )
        return PackLayout(tuple(lengths), ranks)

    def places_without_padding(self, rank: int, lengths: Sequence[int]) -> Tensor:
        """Where among a rank's tokens those of :meth:`without_padding` lie, int64 ``[tokens]``."""
        real = [np.arange(c.start, c.end) < lengths[c.sample] for c in self.ranks[rank]]
        return torch.from_numpy(np.flatnonzero(np.concatenate([np.empty(0, dtype=bool), *real])))

    def validate(self) -> None:
        """Raise :class:`PlanError` unless each token is held once and each rank's chunks ascend."""
        held = [np.zeros(length, dtype=np.int64) for length in self.lengths]
        for rank, chunks in enumerate(self.ranks):
            order = [(c.sample, c.start) for c in chunks]
            if order != sorted(order):
                raise PlanError(f"chunks of rank {rank} must ascend by sample and start, found {chunks}")
            for c in chunks:
                if not (0 <= c.sample < len(self.lengths) and 0 <= c.start < c.end <= self.lengths[c.sample]):
                    raise PlanError(f"rank {rank}: {c} is no part of a sample of lengths {self.lengths}")
                held[c.sample][c.start : c.end] += 1
        wrong = [sample for sample, counts in enumerate(held) if (counts != 1).any()]
        if wrong:
            raise PlanError(f"every token must be held by exactly one rank; not so in sample(s) {wrong}")


def rank_shares(lengths: Sequence[int], size: int) -> list[list[int]]:
    """How many tokens of each sample each rank gets: ``[samples][ranks]``.

    Token t of the pack counts for rank t mod c, so that no sample and no pack is uneven by more than one token: a pack
    of N tokens puts at most ceil(N / c) on a rank, whatever the lengths are.
    """
    shares, offset = [], 0
    for length in lengths:
        base, extra = divmod(length, size)
        shares.append([base + ((rank - offset) % size < extra) for rank in range(size)])
        offset += length
    return shares


def zigzag(lengths: Sequence[int], size: int) -> PackLayout:
    """Each sample in 2c chunks; rank r holds chunk r and chunk 2c - 1 - r, which balances causal work.

    Chunks may be of unequal size and even empty, so no sample is padded.
    """
    ranks: list[list[Chunk]] = [[] for _ in range(size)]
    for sample, shares in enumerate(rank_shares(lengths, size)):
        fronts = [-(-share // 2) for share in shares]
        backs = [share // 2 for share in shares]
        order = [*range(size), *reversed(range(size))]
        start = 0
        for rank, count in zip(order, [*fronts, *reversed(backs)], strict=True):
            _append(ranks[rank], Chunk(sample, start, start + count))
            start += count
    return PackLayout(tuple(lengths), tuple(tuple(chunks) for chunks in ranks))


def contiguous(lengths: Sequence[int], size: int) -> PackLayout:
    """Each sample in c chunks, in the order of the ranks: simple, but the last ranks have most of the causal work."""
    ranks: list[list[Chunk]] = [[] for _ in range(size)]
    for sample, shares in enumerate(rank_shares(lengths, size)):
        start = 0
        for rank, count in enumerate(shares):
            _append(ranks[rank], Chunk(sample, start, start + count))
            start += count
    return PackLayout(tuple(lengths), tuple(tuple(chunks) for chunks in ranks))


def _append(chunks: list[Chunk], chunk: Chunk) -> None:
    """Add a chunk unless it is empty; join it to the one before where they touch."""
    if not len(chunk):
        return
    last = chunks[-1] if chunks else None
    if last is not None and last.sample == chunk.sample and last.end == chunk.start:
        chunks[-1] = Chunk(chunk.sample, last.start, chunk.end)
    else:
        chunks.append(chunk)


BUDGETED = "budgeted"
"""The layout of :mod:`lightning_dcp.boundaries`: cuts at borders of segments, under budgets."""
LAYOUTS: dict[str, Callable[[Sequence[int], int], PackLayout]] = {
    "zigzag": zigzag,
    "contiguous": contiguous,
    BUDGETED: zigzag,  # of samples without segments; those that have some are laid out when the batch is planned
}
"""The layouts that a plan can name."""


def build_layout(name: str, lengths: Sequence[int], size: int) -> PackLayout:
    """The layout of a pack by its name in the plan.

    Raises:
        PlanError: no layout of that name, or one that does not hold each token of these samples once, on so many ranks.
    """
    if name not in LAYOUTS:
        raise PlanError(f"unknown layout {name!r}; there are {sorted(LAYOUTS)}")
    layout = LAYOUTS[name](lengths, size)
    if (layout.lengths, layout.size) != (tuple(lengths), size):
        raise PlanError(
            f"layout {name!r} was asked for lengths {tuple(lengths)} on {size} ranks, and is one of lengths "
            f"{layout.lengths} on {layout.size}"
        )
    layout.validate()
    return layout
