"""Variable-length kernels: all blocks of a kind in one call."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_dcp.attention.kernels.base import BackwardPart, ForwardPart, Kernel
from lightning_dcp.attention.kernels.padding import common_width, pad_heads
from lightning_dcp.attention.shape import AttentionShape, Scores
from lightning_dcp.parallel.blocks import AttentionBlocks


@dataclass(frozen=True)
class VarlenArguments:
    """What a variable-length kernel takes besides its tensors.

    Attributes:
        cu_seqlens_q: cumulative queries of the blocks, int32 ``[blocks + 1]``.
        cu_seqlens_k: cumulative keys of the blocks, int32 ``[blocks + 1]``.
        max_seqlen_q: queries of the largest block.
        max_seqlen_k: keys of the largest block.
        causal: whether query t of a block sees its keys 0 .. t only; there are as many keys as queries then.
        scale: factor of the scores.
        softcap: see :class:`~lightning_dcp.attention.shape.Scores`; 0 for none.
    """

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    causal: bool
    scale: float
    softcap: float


class VarlenKernel(Kernel):
    """A kernel that takes packed blocks. Subclasses say how one call is made, and what it takes.

    Attributes:
        head_multiple: head sizes are padded with 0 to a multiple of this.
        max_head_dim: the widest head.
        has_softcap: whether it can cap scores.
        dtypes: of its tensors.
    """

    head_multiple: ClassVar[int] = 8
    max_head_dim: ClassVar[int] = 256
    has_softcap: ClassVar[bool] = False
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float16, torch.bfloat16)
    device: ClassVar[str] = "cuda"

    @abstractmethod
    def missing(self) -> str | None:
        """What this machine lacks for the kernel; None if it can run."""

    @abstractmethod
    def run(self, q: Tensor, k: Tensor, v: Tensor, arguments: VarlenArguments) -> tuple[Tensor, Tensor]:
        """Outputs ``[n, H, D]`` and logsumexp ``[H, n]`` (float32) of packed blocks."""

    @abstractmethod
    def run_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, arguments: VarlenArguments
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v; ``lse`` is ``[H, n]``, contiguous."""

    def refusal(self, shape: AttentionShape, scores: Scores) -> str | None:  # noqa: D102
        if shape.device != self.device:
            return f"it runs on {self.device}, not on {shape.device}"
        if shape.dtype not in self.dtypes:
            return f"it has no {shape.dtype}"
        if common_width(shape) > self.max_head_dim:
            return f"its heads are at most {self.max_head_dim} wide"
        if scores.scale <= 0:
            return "it takes scales above 0 only"
        if scores.softcap and not self.has_softcap:
            return "it has no soft-cap"
        return self.missing()

    def forward(  # noqa: D102
        self, q: Tensor, k: Tensor, v: Tensor, blocks: AttentionBlocks, scores: Scores
    ) -> Iterator[ForwardPart]:
        rows, keys, wanted = blocks.q_index, blocks.k_index, v.shape[-1]
        width = common_width(AttentionShape.of(q, k, v), self.head_multiple)
        packed = pad_heads(q[rows], width), pad_heads(k[keys], width), pad_heads(v[keys], width)
        out, lse = self.run(*packed, _arguments(blocks, scores))
        yield rows, out[..., :wanted], lse.transpose(0, 1)

    def backward(  # noqa: D102
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
        rows, keys, widths = blocks.q_index, blocks.k_index, (q.shape[-1], k.shape[-1], v.shape[-1])
        width = common_width(AttentionShape.of(q, k, v), self.head_multiple)
        grad, q, out = (pad_heads(t[rows], width) for t in (grad, q, out))
        k, v = (pad_heads(t[keys], width) for t in (k, v))
        lse = lse[rows].transpose(0, 1).contiguous()
        grads = self.run_backward(grad, q, k, v, out, lse, _arguments(blocks, scores))
        dq, dk, dv = (g[..., :w] for g, w in zip(grads, widths, strict=True))
        yield rows, keys, dq, dk, dv


def _arguments(blocks: AttentionBlocks, scores: Scores) -> VarlenArguments:
    return VarlenArguments(
        blocks.cu_seqlens_q,
        blocks.cu_seqlens_k,
        blocks.max_seqlen_q,
        blocks.max_seqlen_k,
        blocks.causal,
        scores.scale,
        scores.softcap,
    )
