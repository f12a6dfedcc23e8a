"""What a kernel is: attention over the blocks of one kind, on one device, as a part to be joined to others."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar

from torch import Tensor

from lightning_dcp.attention.shape import AttentionShape, Scores
from lightning_dcp.parallel.blocks import AttentionBlocks

Rows = slice | Tensor
"""Tokens: a stretch, or an index; no token twice."""
ForwardPart = tuple[Rows, Tensor, Tensor]
"""``(query rows, out [n, H, D_v], lse [n, H])``: outputs over a block's keys, and the logsumexp of their scores."""
BackwardPart = tuple[Rows, Rows, Tensor, Tensor, Tensor]
"""``(query rows, key rows, dq, dk, dv)``; key rows may repeat if they are an index."""


class Kernel(ABC):
    """Attention of some queries over some keys, with the logsumexp that joins it to the rest.

    All tensors are ``[tokens, heads, head_dim]``; query heads are a multiple of key heads (grouped-query attention).
    """

    name: ClassVar[str]
    """By which it is asked for."""

    @abstractmethod
    def refusal(self, shape: AttentionShape, scores: Scores) -> str | None:
        """Why this kernel cannot compute such a call on this machine; None if it can."""

    @abstractmethod
    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, blocks: AttentionBlocks, scores: Scores
    ) -> Iterator[ForwardPart]:
        """Outputs of the blocks' queries over the blocks' keys, in parts; no row twice in all of them."""

    @abstractmethod
    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        blocks: AttentionBlocks,
        scores: Scores,
    ) -> Iterator[BackwardPart]:
        """Gradients by the blocks; ``out`` and ``lse`` are those over all keys of all blocks, here and elsewhere."""
