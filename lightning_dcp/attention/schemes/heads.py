"""Which heads each rank computes when heads are split over a group, and what is sent for that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lightning_dcp.attention.shape import AttentionShape
from lightning_dcp.parallel.context import CPContext


@dataclass(frozen=True)
class HeadSplit:
    """Query heads in c parts that differ by one at most, each with the key heads that it needs.

    Attributes:
        heads: query heads, H; need not be a multiple of c, and some ranks may have none.
        kv_heads: key and value heads, H_kv.
        size: ranks, c.
    """

    heads: int
    kv_heads: int
    size: int

    def queries(self, rank: int) -> slice:
        """A rank's query heads."""
        return slice(rank * self.heads // self.size, (rank + 1) * self.heads // self.size)

    def keys(self, rank: int) -> slice:
        """The key heads that a rank's query heads share; neighbouring ranks may need the same ones."""
        own, group = self.queries(rank), self.heads // self.kv_heads
        first = own.start // group
        return slice(first, max(first, -(-own.stop // group)) if own.stop > own.start else first)

    def key_of_each(self, rank: int) -> list[int] | None:
        """For each of a rank's query heads its place among the rank's key heads; None where these are even groups."""
        own, group, first = self.queries(rank), self.heads // self.kv_heads, self.keys(rank).start
        found = [head // group - first for head in range(own.start, own.stop)]
        counts = {found.count(key) for key in found}
        return None if len(counts) <= 1 else found


@dataclass(frozen=True)
class HeadExchange:
    """Moves tensors between "my tokens of all heads" and "all tokens of my heads", in the pack's order.

    Attributes:
        context: group and layout.
        shape: of the call.
    """

    context: CPContext
    shape: AttentionShape

    @cached_property
    def split(self) -> HeadSplit:
        """Who computes which heads."""
        return HeadSplit(self.shape.heads, self.shape.kv_heads, self.context.size)

    @property
    def own_heads(self) -> slice:
        """The query heads that this rank computes."""
        return self.split.queries(self.context.rank)

    def gather_tokens(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """This rank's tokens to this rank's heads: ``[n, heads, D]`` to ``[T, own heads, D]`` each."""
        parts = []
        for rank in range(self.context.size):
            queries, keys = self.split.queries(rank), self.split.keys(rank)
            parts.append(_side_by_side(q[:, queries], k[:, keys], v[:, keys]))
        return self._parted(self._to_heads(parts), self.context.rank)

    def scatter_gradients(self, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The reverse, for gradients: those of a key head that several ranks had are added up, in the ranks' order."""
        shape, tokens = self.shape, self.context.num_local_tokens
        whole_q = dq.new_empty(tokens, shape.heads, shape.head_dim)
        whole_k = dq.new_zeros(tokens, shape.kv_heads, shape.head_dim)
        whole_v = dq.new_zeros(tokens, shape.kv_heads, shape.v_head_dim)
        widths = [sum(self._widths(rank)) for rank in range(self.context.size)]
        for rank, columns in enumerate(self._to_tokens(_side_by_side(dq, dk, dv), [(w,) for w in widths])):
            part_q, part_k, part_v = self._parted(columns, rank)
            whole_q[:, self.split.queries(rank)] = part_q
            whole_k[:, self.split.keys(rank)] += part_k
            whole_v[:, self.split.keys(rank)] += part_v
        return whole_q, whole_k, whole_v

    def gather_outputs(self, x: Tensor) -> Tensor:
        """Outputs, or their gradient: ``[n, H, D_v]`` to ``[T, own heads, D_v]``."""
        return self._to_heads([x[:, self.split.queries(rank)] for rank in range(self.context.size)])

    def scatter_outputs(self, x: Tensor) -> Tensor:
        """Outputs: ``[T, own heads, D_v]`` to ``[n, H, D_v]``."""
        counts = [self._counts(rank)[0] for rank in range(self.context.size)]
        return torch.cat(self._to_tokens(x, [(count, x.shape[-1]) for count in counts]), dim=1)

    def _to_heads(self, parts: Sequence[Tensor]) -> Tensor:
        trailing = parts[self.context.rank].shape[1:]
        received = self.context.exchange.all_to_all(parts, [(n, *trailing) for n in self.context.tokens])
        stacked = torch.cat(received)
        whole = torch.empty_like(stacked)
        whole[self.context.gather_index] = stacked
        return whole

    def _to_tokens(self, x: Tensor, trailing: Sequence[tuple[int, ...]]) -> list[Tensor]:
        parts = x[self.context.gather_index].split(self.context.tokens)
        shapes = [(self.context.num_local_tokens, *rest) for rest in trailing]
        return self.context.exchange.all_to_all(parts, shapes)

    def _counts(self, rank: int) -> list[int]:
        spans = self.split.queries(rank), self.split.keys(rank), self.split.keys(rank)
        return [span.stop - span.start for span in spans]

    def _widths(self, rank: int) -> list[int]:
        sizes = self.shape.head_dim, self.shape.head_dim, self.shape.v_head_dim
        return [count * size for count, size in zip(self._counts(rank), sizes, strict=True)]

    def _parted(self, columns: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
        parts = zip(columns.split(self._widths(rank), dim=1), self._counts(rank), strict=True)
        sizes = self.shape.head_dim, self.shape.head_dim, self.shape.v_head_dim
        q, k, v = (p.reshape(len(p), count, size) for (p, count), size in zip(parts, sizes, strict=True))
        return q, k, v


def _side_by_side(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """``[n, heads, size]`` each to ``[n, width]``."""
    return torch.cat([q.flatten(1), k.flatten(1), v.flatten(1)], dim=1)
