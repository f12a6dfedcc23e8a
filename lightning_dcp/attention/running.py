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
    """Gradients of queries, keys and values by the blocks seen so far.

    Args:
        q: ``[n, H, D]``; gives shape and device.
    """

    def __init__(self, q: Tensor) -> None:
        wide = torch.promote_types(q.dtype, torch.float32)
        self.dq = torch.zeros(q.shape, dtype=wide, device=q.device)

    def add(self, parts: Iterable[BackwardPart], dk: Tensor, dv: Tensor) -> None:
        """Take in the gradients of some blocks; those of keys and values go to ``dk`` and ``dv``."""
        for rows, keys, part_q, part_k, part_v in parts:
            for whole, where, part in ((self.dq, rows, part_q), (dk, keys, part_k), (dv, keys, part_v)):
                if isinstance(where, slice):
                    whole[where] += part
                else:
                    whole.index_add_(0, where, part.to(whole.dtype))


def empty_gradients(k: Tensor, v: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Zeros for the gradients of keys and values, next to each other in memory: they travel as one message."""
    both = torch.zeros(k.numel() + v.numel(), dtype=dtype, device=k.device)
    return both[: k.numel()].view(k.shape), both[k.numel() :].view(v.shape)
