"""Which queries of one rank attend to which keys of another: dense blocks, so that no mask is ever made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lightning_dcp.parallel.layout import Chunk, PackLayout


@dataclass(frozen=True)
class AttentionBlock:
    """One dense block of attention, as slices of the two ranks' local tokens: the queries see all of the keys.

    In a causal block queries and keys are the same tokens, and each sees itself and those before it.
    """

    q_start: int
    q_end: int
    k_start: int
    k_end: int

    @property
    def queries(self) -> slice:
        """The block's queries among the local tokens."""
        return slice(self.q_start, self.q_end)

    @property
    def keys(self) -> slice:
        """The block's keys among the other rank's tokens."""
        return slice(self.k_start, self.k_end)


@dataclass(frozen=True, eq=False)
class AttentionBlocks:
    """All blocks of one hop, with the index tensors that a variable-length kernel takes.

    Attributes:
        blocks: ascending by query; of one sample each.
        causal: whether these are the causal blocks of a rank with itself.
        device: where the index tensors lie.
    """

    blocks: tuple[AttentionBlock, ...]
    causal: bool
    device: torch.device

    @cached_property
    def q_index(self) -> Tensor:
        """Local query tokens, block after block."""
        return self._index([b.queries for b in self.blocks])

    @cached_property
    def k_index(self) -> Tensor:
        """Key tokens, block after block; a key may be in several blocks."""
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
        return torch.cat([torch.arange(span.start, span.stop) for span in spans]).to(self.device)

    def _cumulative(self, lengths: Sequence[int]) -> Tensor:
        return torch.tensor([0, *lengths]).cumsum(0).to(dtype=torch.int32, device=self.device)


def attention_blocks(layout: PackLayout, q_rank: int, k_rank: int, device: torch.device) -> AttentionBlocks:
    """The blocks of causal attention from one rank's queries to one rank's keys.

    Chunks do not overlap, so of two different chunks of a sample one lies wholly before the other: a pair is either
    skipped or full. A rank's own chunks of a sample, ascending, make one causal block. Neighbouring chunks that see
    the same keys share a block.
    """
    queries, keys = _by_sample(layout.ranks[q_rank]), _by_sample(layout.ranks[k_rank])
    blocks: list[AttentionBlock] = []
    for sample, (q_offset, q_chunks) in queries.items():
        if q_rank == k_rank:
            end = q_offset + sum(map(len, q_chunks))
            blocks.append(AttentionBlock(q_offset, end, q_offset, end))
        elif sample in keys:
            blocks.extend(_full_blocks(q_offset, q_chunks, *keys[sample]))
    return AttentionBlocks(tuple(blocks), q_rank == k_rank, device)


def _by_sample(chunks: Sequence[Chunk]) -> dict[int, tuple[int, list[Chunk]]]:
    """For each sample: the offset of its first local token, and its chunks."""
    found: dict[int, tuple[int, list[Chunk]]] = {}
    offset = 0
    for chunk in chunks:
        found.setdefault(chunk.sample, (offset, []))[1].append(chunk)
        offset += len(chunk)
    return found


def _full_blocks(
    q_offset: int, q_chunks: Sequence[Chunk], k_offset: int, k_chunks: Sequence[Chunk]
) -> list[AttentionBlock]:
    """Blocks from a sample's query chunks to the key chunks before them, merged where the keys are the same."""
    blocks: list[AttentionBlock] = []
    for q in q_chunks:
        k_end = k_offset + sum(len(k) for k in k_chunks if k.end <= q.start)
        q_end = q_offset + len(q)
        if k_end > k_offset and blocks and (blocks[-1].k_end, blocks[-1].q_end) == (k_end, q_offset):
            blocks[-1] = AttentionBlock(blocks[-1].q_start, q_end, k_offset, k_end)
        elif k_end > k_offset:
            blocks.append(AttentionBlock(q_offset, q_end, k_offset, k_end))
        q_offset = q_end
    return blocks
