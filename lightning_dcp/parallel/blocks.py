"""Which queries attend to which keys, as blocks without masks: full ones, and triangles on a diagonal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property, lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_dcp.parallel.layout import PackLayout

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class AttentionMask:
    """Which tokens of its own sample a token sees; never one of another sample.

    Attributes:
        causal: whether a token sees none that comes after it; one value for all samples of the pack, or one for each.
        window_size: how many tokens a token sees before and after itself, as flash-attn counts: ``(left, right)``, -1
            for all of them. A sliding window of n tokens with the token itself is ``(n - 1, 0)``.
    """

    causal: bool | tuple[bool, ...] = True
    window_size: tuple[int, int] = (-1, -1)

    def __post_init__(self) -> None:
        # lists, as YAML and JSON have them, could not be looked up
        object.__setattr__(self, "window_size", tuple(self.window_size))
        if not isinstance(self.causal, bool):
            object.__setattr__(self, "causal", tuple(self.causal))

    def bounds(self, lengths: Sequence[int]) -> tuple[Indices, Indices]:
        """For each token of the pack the first and the last token of the pack that it sees, int64 ``[T]`` each."""
        tokens = np.asarray(lengths, dtype=np.int64)
        ends = np.repeat(np.cumsum(tokens), tokens)
        starts = ends - np.repeat(tokens, tokens)
        at = np.arange(len(ends), dtype=np.int64)
        longest = int(tokens.max(initial=0))
        left, right = (min(size, longest) for size in self.window_size)
        first = starts if left < 0 else np.maximum(starts, at - left)
        last = ends - 1 if right < 0 else np.minimum(ends - 1, at + right)
        causal = self.causal if isinstance(self.causal, bool) else np.repeat(np.asarray(self.causal), tokens)
        return first, np.where(causal, np.minimum(last, at), last)


class BlockKind(Enum):
    """What a block's queries see of its keys."""

    FULL = "full"
    """Every query sees every key."""
    LOWER = "lower"
    """As many keys as queries: query t sees keys 0 .. t, the triangle of causal attention."""
    UPPER = "upper"
    """As many keys as queries: query t sees keys t .. n - 1, where a sliding window ends."""


@dataclass(frozen=True)
class AttentionBlock:
    """One block, as slices of the queries and the keys at hand."""

    q_start: int
    q_end: int
    k_start: int
    k_end: int

    @property
    def queries(self) -> slice:
        """The block's queries."""
        return slice(self.q_start, self.q_end)

    @property
    def keys(self) -> slice:
        """The block's keys."""
        return slice(self.k_start, self.k_end)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to compute."""
        return self.q_end <= self.q_start or self.k_end <= self.k_start

    @property
    def is_pair(self) -> bool:
        """Whether this is one query and one key."""
        return self.q_end == self.q_start + 1 and self.k_end == self.k_start + 1


@dataclass(frozen=True, eq=False)
class AttentionBlocks:
    """Blocks of one kind, with the index tensors that a variable-length kernel takes: all of them are one call.

    Attributes:
        kind: of all the blocks.
        blocks: ascending by query, of one sample each; no query is in two of them.
        device: where the index tensors lie.
    """

    kind: BlockKind
    blocks: tuple[AttentionBlock, ...]
    device: torch.device

    @property
    def causal(self) -> bool:
        """Whether a causal kernel computes these: in an upper triangle it does so from the last token to the first."""
        return self.kind is not BlockKind.FULL

    @cached_property
    def num_queries(self) -> int:
        """Queries of all blocks together."""
        return sum(b.q_end - b.q_start for b in self.blocks)

    @cached_property
    def q_index(self) -> Tensor:
        """Query tokens, block after block, each block in the order in which a kernel takes it."""
        return self._index([b.queries for b in self.blocks])

    @cached_property
    def k_index(self) -> Tensor:
        """Key tokens, block after block, as ``q_index``; a key may be in several blocks."""
        return self._index([b.keys for b in self.blocks])

    @cached_property
    def cu_seqlens_q(self) -> Tensor:
        """Cumulative queries a block, int32."""
        return self._cumulative([b.q_end - b.q_start for b in self.blocks])

    @cached_property
    def cu_seqlens_k(self) -> Tensor:
        """Cumulative keys a block, int32."""
        return self._cumulative([b.k_end - b.k_start for b in self.blocks])

    @cached_property
    def max_seqlen_q(self) -> int:
        """Queries of the largest block."""
        return max(b.q_end - b.q_start for b in self.blocks)

    @cached_property
    def max_seqlen_k(self) -> int:
        """Keys of the largest block."""
        return max(b.k_end - b.k_start for b in self.blocks)

    def _index(self, spans: Sequence[slice]) -> Tensor:
        step = -1 if self.kind is BlockKind.UPPER else 1
        return torch.from_numpy(np.concatenate([np.arange(s.start, s.stop)[::step] for s in spans])).to(self.device)

    def _cumulative(self, lengths: Sequence[int]) -> Tensor:
        return torch.tensor([0, *lengths]).cumsum(0).to(dtype=torch.int32, device=self.device)


def attention_blocks(
    layout: PackLayout, q_rank: int | None, k_rank: int | None, mask: AttentionMask, device: torch.device
) -> tuple[AttentionBlocks, ...]:
    """The blocks from one rank's queries to one rank's keys; ``None`` stands for the whole pack, in its order.

    The keys that a query sees are neighbours among the keys at hand, whatever the layout is: chunks ascend. From one
    query to the next the ends of that stretch stay, move on by one, or jump. Where each of them keeps staying or keeps
    moving there is a full block with at most a triangle on either side; where one jumps, a new block begins. So causal
    text has one lower triangle a sample on a rank's own keys and full blocks elsewhere, and a pair of chunks with
    nothing to see has no block.

    Returns:
        The groups of each kind of which there are any, lower triangles first.
    """
    first, last, sample_of = _whole_pack(mask, layout.lengths)
    queries, keys = _pack_index(layout, q_rank), _pack_index(layout, k_rank)
    begins = np.searchsorted(keys, first[queries], side="left")
    ends = np.searchsorted(keys, last[queries], side="right")
    found: dict[BlockKind, list[AttentionBlock]] = {BlockKind.LOWER: [], BlockKind.FULL: [], BlockKind.UPPER: []}
    single = []
    for start, stop in _stretches(begins, ends, sample_of[queries]):
        blocks = [(kind, block) for kind, block in _stretch_blocks(begins, ends, start, stop) if not block.is_empty]
        if len(blocks) == 1 and blocks[0][1].is_pair:
            single.append(blocks[0][1])
        else:
            for kind, block in blocks:
                found[kind].append(block)
    # A pair is a block of any kind: it goes where there is a call to be made anyway.
    kind = BlockKind.LOWER if found[BlockKind.LOWER] else BlockKind.FULL
    found[kind] = sorted([*found[kind], *single], key=lambda block: block.q_start)
    return tuple(AttentionBlocks(kind, tuple(of_kind), device) for kind, of_kind in found.items() if of_kind)


@lru_cache(maxsize=4)
def _whole_pack(mask: AttentionMask, lengths: tuple[int, ...]) -> tuple[Indices, Indices, Indices]:
    """The first and the last token that each token sees, and its sample; the same for every hop of a pack."""
    return *mask.bounds(lengths), np.repeat(np.arange(len(lengths)), lengths)


def _pack_index(layout: PackLayout, rank: int | None) -> Indices:
    return np.arange(layout.num_tokens) if rank is None else layout.pack_index(rank).numpy()


def _stretches(begins: Indices, ends: Indices, sample: Indices) -> Iterator[tuple[int, int]]:
    """Runs of queries of one sample over which each end of what they see keeps staying or keeps moving on by one."""
    step_begin, step_end = np.diff(begins), np.diff(ends)
    steady = (step_begin >> 1 == 0) & (step_end >> 1 == 0) & (np.diff(sample) == 0)
    code = np.where(steady, 2 * step_begin + step_end, -1)
    changes = np.append(np.flatnonzero(np.diff(code)) + 1, len(code))
    run_ends = np.repeat(changes, np.diff(changes, prepend=0)) if len(code) else changes
    query, last = 0, len(begins) - 1
    while query <= last:
        # the last step of a run leads to its last query; the step after that, of whatever size, to the next run
        stop = query + 1 if query == last or code[query] < 0 else int(run_ends[query]) + 1
        yield query, stop
        query = stop


def _stretch_blocks(
    begins: Indices, ends: Indices, start: int, stop: int
) -> Iterator[tuple[BlockKind, AttentionBlock]]:
    """The blocks of one stretch of queries ``start .. stop - 1``; some may be empty."""
    begin, end = int(begins[start]), int(ends[start])
    begin_moves, end_moves = int(begins[stop - 1]) > begin, int(ends[stop - 1]) > end
    if begin_moves and end_moves:
        yield from _band_blocks(start, stop, begin, end)
    elif end_moves:  # the first query sees nothing of the triangle if it sees nothing at all
        first = start + (end == begin)
        yield BlockKind.FULL, AttentionBlock(first, stop, begin, end - (end > begin))
        width = stop - first
        yield BlockKind.LOWER, AttentionBlock(first, stop, int(ends[first]) - 1, int(ends[first]) - 1 + width)
    elif begin_moves:
        last = stop - (int(begins[stop - 1]) == end)
        yield BlockKind.UPPER, AttentionBlock(start, last, begin, begin + last - start)
        yield BlockKind.FULL, AttentionBlock(start, last, begin + last - start, end)
    else:
        yield BlockKind.FULL, AttentionBlock(start, stop, begin, end)


def _band_blocks(start: int, stop: int, begin: int, end: int) -> Iterator[tuple[BlockKind, AttentionBlock]]:
    """A band of constant width: strips no wider than it, each with a triangle on either side."""
    width = end - begin
    for query in range(start, stop if width else start, max(1, width)):
        rows = min(width, stop - query)
        low, high = begin + query - start, end + query - start
        yield BlockKind.LOWER, AttentionBlock(query, query + rows, high - 1, high - 1 + rows)
        yield BlockKind.FULL, AttentionBlock(query, query + rows, low + rows - 1, high - 1)
        yield BlockKind.UPPER, AttentionBlock(query, query + rows - 1, low, low + rows - 1)
