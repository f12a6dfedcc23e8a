"""Results that grow block by block, in float32 or float64: nothing is rounded between blocks or hops."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lightning_dcp.attention.kernels.base import BackwardPart, Kernel, Rows
from lightning_dcp.attention.merge import merge_
from lightning_dcp.attention.shape import AttentionShape, Scores
from lightning_dcp.parallel.blocks import AttentionBlocks
from lightning_dcp.parallel.exchange import Transfer


class RunningOutput:
    """Outputs of some queries over the keys seen so far.

    Attributes:
        out: ``[n, H, D_v]``.
        lse: logsumexp of the scores, ``[n, H]``; -inf where no key was seen.
    """

    def __init__(self, q: Tensor, v: Tensor) -> None:
        wide = AttentionShape.of(q, v, v).wide
        self.out = torch.zeros((*q.shape[:2], v.shape[-1]), dtype=wide, device=q.device)
        self.lse = torch.full(q.shape[:2], -math.inf, dtype=wide, device=q.device)
        self._untouched = True

    def add(
        self, kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, groups: Sequence[AttentionBlocks], scores: Scores
    ) -> None:
        """Take in more keys."""
        for blocks in groups:
            whole = self._untouched and blocks.num_queries == len(q)  # every query at once: nothing to join with yet
            self._untouched = False
            for rows, part, part_lse in kernel.forward(q, k, v, blocks, scores):
                if whole:
                    self.out[rows], self.lse[rows] = part.to(self.out.dtype), part_lse.to(self.lse.dtype)
                else:
                    self._join(rows, part, part_lse)

    def _join(self, rows: Rows, part: Tensor, part_lse: Tensor) -> None:
        if isinstance(rows, slice):
            merge_(self.out[rows], self.lse[rows], part, part_lse.to(self.lse.dtype))
        else:
            out, lse = self.out[rows], self.lse[rows]
            merge_(out, lse, part, part_lse.to(lse.dtype))
            self.out[rows], self.lse[rows] = out, lse


class RunningGradients:
    """Gradients of queries by the blocks seen so far.

    Args:
        q: ``[n, H, D]``; gives shape and device.
    """

    def __init__(self, q: Tensor) -> None:
        wide = torch.promote_types(q.dtype, torch.float32)
        self.dq = torch.zeros(q.shape, dtype=wide, device=q.device)

    def add(self, parts: Iterable[BackwardPart], keys_and_values: KeyValueGradients) -> None:
        """Take in the gradients of some blocks."""
        for rows, keys, part_q, part_k, part_v in parts:
            add_rows(self.dq, rows, part_q)
            keys_and_values.add(keys, part_k, part_v)


class KeyValueGradients:
    """Gradients of keys and values by the blocks seen so far, to which those that other ranks found may be under way.

    Until these arrive, the parts found here are kept as the kernel made them, as long as they are no more than the
    gradients themselves; then they are added to what came in. So there is never a third buffer of that size, and the
    transfer goes on under the kernels.

    Args:
        k: ``[n, H_kv, D]``; gives shape and device.
        v: ``[n, H_kv, D_v]``.
        dtype: in which gradients are added up.
        incoming: the transfer of two tensors like k and v; without one the gradients begin at 0.
    """

    def __init__(self, k: Tensor, v: Tensor, dtype: torch.dtype, incoming: Transfer | None = None) -> None:
        self._incoming, self._kept = incoming, list[tuple[Rows, Tensor, Tensor]]()
        self._room = k.numel() + v.numel()
        self._sums: tuple[Tensor, ...] = empty_gradients(k, v, dtype) if incoming is None else ()

    def add(self, keys: Rows, part_k: Tensor, part_v: Tensor) -> None:
        """Take in the gradients of some keys and values."""
        self._room -= part_k.numel() + part_v.numel()
        if self._incoming is not None and self._room >= 0:
            self._kept.append((keys, part_k, part_v))
            return
        dk, dv = self.sums()
        add_rows(dk, keys, part_k)
        add_rows(dv, keys, part_v)

    def sums(self) -> tuple[Tensor, Tensor]:
        """The gradients of keys and of values, next to each other in memory; waits for what is under way."""
        if self._incoming is not None:
            self._sums, self._incoming = tuple(self._incoming.wait()), None
            while self._kept:
                self.add(*self._kept.pop(0))
        dk, dv = self._sums
        return dk, dv


def add_rows(whole: Tensor, where: Rows, part: Tensor) -> None:
    """Add to some rows in place; rows of an index may repeat."""
    if isinstance(where, slice):
        whole[where] += part
    else:
        whole.index_add_(0, where, part.to(whole.dtype))


def empty_gradients(k: Tensor, v: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Zeros for the gradients of keys and values, next to each other in memory: they travel as one message."""
    both = torch.zeros(k.numel() + v.numel(), dtype=dtype, device=k.device)
    return both[: k.numel()].view(k.shape), both[k.numel() :].view(v.shape)
