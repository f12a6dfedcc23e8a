"""Kernels that compute the attention blocks of one hop on one device.

All tensors are ``[tokens, heads, head_dim]``; query heads are a multiple of key heads (grouped-query attention).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_dcp.errors import UnsupportedAttentionError
from lightning_dcp.parallel.blocks import AttentionBlocks

Rows = slice | Tensor


class Kernel(ABC):
    """Attention of some queries over some keys, with the logsumexp that joins it to the rest."""

    @abstractmethod
    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, blocks: AttentionBlocks, scale: float
    ) -> Iterator[tuple[Rows, Tensor, Tensor]]:
        """Yield ``(query rows, out [n, H, D], lse [n, H])`` for the blocks; no row twice in one yield."""

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
        scale: float,
    ) -> Iterator[tuple[Rows, Rows, Tensor, Tensor, Tensor]]:
        """Yield ``(query rows, key rows, dq, dk, dv)``; ``out`` and ``lse`` are those over all keys of all hops."""


class CPUFlashKernel(Kernel):
    """torch's flash attention for CPU, one call a block; float32, float64, bfloat16, float16."""

    def forward(  # noqa: D102
        self, q: Tensor, k: Tensor, v: Tensor, blocks: AttentionBlocks, scale: float
    ) -> Iterator[tuple[Rows, Tensor, Tensor]]:
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        q, k, v = _heads_first(q), _heads_first(k), _heads_first(v)
        for block in blocks.blocks:
            rows, keys = block.queries, block.keys
            out, lse = flash(q[:, :, rows], k[:, :, keys], v[:, :, keys], 0.0, blocks.causal, scale=scale)
            yield rows, out[0].transpose(0, 1), lse[0].transpose(0, 1)

    def backward(  # noqa: D102
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        blocks: AttentionBlocks,
        scale: float,
    ) -> Iterator[tuple[Rows, Rows, Tensor, Tensor, Tensor]]:
        flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        grad, q, k, v, out = (_heads_first(t) for t in (grad, q, k, v, out))
        lse = lse.transpose(0, 1).unsqueeze(0)
        for block in blocks.blocks:
            r, s = block.queries, block.keys
            dq, dk, dv = flash_backward(
                grad[:, :, r],
                q[:, :, r],
                k[:, :, s],
                v[:, :, s],
                out[:, :, r],
                lse[:, :, r],
                0.0,
                blocks.causal,
                scale=scale,
            )
            yield r, s, dq[0].transpose(0, 1), dk[0].transpose(0, 1), dv[0].transpose(0, 1)


def _heads_first(x: Tensor) -> Tensor:
    """``[T, H, D]`` to ``[1, H, T, D]``."""
    return x.transpose(0, 1).unsqueeze(0)


class ReferenceKernel(Kernel):
    """Plain matrix products, any dtype and device: what other kernels are tested against."""

    def forward(  # noqa: D102
        self, q: Tensor, k: Tensor, v: Tensor, blocks: AttentionBlocks, scale: float
    ) -> Iterator[tuple[Rows, Tensor, Tensor]]:
        for block in blocks.blocks:
            scores = _scores(q[block.queries], k[block.keys], scale, causal=blocks.causal)
            lse = scores.logsumexp(-1)
            values = _repeat_heads(v[block.keys], q.shape[1]).to(scores.dtype)
            out = torch.einsum("hqk,khd->qhd", (scores - lse.unsqueeze(-1)).exp(), values)
            yield block.queries, out, lse.transpose(0, 1)

    def backward(  # noqa: D102
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        blocks: AttentionBlocks,
        scale: float,
    ) -> Iterator[tuple[Rows, Rows, Tensor, Tensor, Tensor]]:
        for block in blocks.blocks:
            rows, keys = block.queries, block.keys
            scores = _scores(q[rows], k[keys], scale, causal=blocks.causal)
            weights = (scores - lse[rows].transpose(0, 1).unsqueeze(-1)).exp()
            g, o = grad[rows].to(scores.dtype), out[rows].to(scores.dtype)
            values = _repeat_heads(v[keys], q.shape[1]).to(scores.dtype)
            queries, all_keys = q[rows].to(scores.dtype), _repeat_heads(k[keys], q.shape[1]).to(scores.dtype)
            delta = (g * o).sum(-1).transpose(0, 1).unsqueeze(-1)
            dscores = weights * (torch.einsum("qhd,khd->hqk", g, values) - delta) * scale
            dq = torch.einsum("hqk,khd->qhd", dscores, all_keys)
            dk = _sum_heads(torch.einsum("hqk,qhd->khd", dscores, queries), k.shape[1])
            dv = _sum_heads(torch.einsum("hqk,qhd->khd", weights, g), v.shape[1])
            yield rows, keys, dq, dk, dv


def _repeat_heads(x: Tensor, heads: int) -> Tensor:
    return x.repeat_interleave(heads // x.shape[1], dim=1)


def _sum_heads(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(1, (heads, -1)).sum(2)


def _scores(q: Tensor, k: Tensor, scale: float, *, causal: bool) -> Tensor:
    """Scaled scores ``[H, q, k]`` in float32 or better."""
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = torch.einsum("qhd,khd->hqk", q.to(wide), _repeat_heads(k, q.shape[1]).to(wide)) * scale
    if causal:
        later = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, -math.inf)
    return scores


@dataclass(frozen=True)
class VarlenKernel(Kernel):
    """A variable-length kernel: all blocks of a hop in one call.

    Attributes:
        run: ``(q, k, v, cu_q, cu_k, max_q, max_k, causal, scale) -> (out [n, H, D], lse [H, n], state)``.
        run_backward: the same arguments after ``grad, out, lse``, then ``state``, to ``(dq, dk, dv)``.
        head_multiple: head sizes are padded with 0 to a multiple of this.
    """

    run: Callable[..., tuple[Tensor, Tensor, Any]]
    run_backward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    head_multiple: int = 1

    def forward(  # noqa: D102
        self, q: Tensor, k: Tensor, v: Tensor, blocks: AttentionBlocks, scale: float
    ) -> Iterator[tuple[Rows, Tensor, Tensor]]:
        if blocks.blocks:
            rows, keys, width = blocks.q_index, blocks.k_index, q.shape[-1]
            q, k, v = self._pad(q[rows]), self._pad(k[keys]), self._pad(v[keys])
            out, lse, _ = self.run(q, k, v, *_boundaries(blocks), blocks.causal, scale)
            yield rows, out[..., :width], lse.transpose(0, 1)

    def backward(  # noqa: D102
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        blocks: AttentionBlocks,
        scale: float,
    ) -> Iterator[tuple[Rows, Rows, Tensor, Tensor, Tensor]]:
        if blocks.blocks:
            rows, keys, width = blocks.q_index, blocks.k_index, q.shape[-1]
            q, k, v = self._pad(q[rows]), self._pad(k[keys]), self._pad(v[keys])
            grad, out, lse = self._pad(grad[rows]), self._pad(out[rows]), lse[rows].transpose(0, 1).contiguous()
            dq, dk, dv = self.run_backward(grad, q, k, v, out, lse, *_boundaries(blocks), blocks.causal, scale)
            yield rows, keys, dq[..., :width], dk[..., :width], dv[..., :width]

    def _pad(self, x: Tensor) -> Tensor:
        return F.pad(x, (0, -x.shape[-1] % self.head_multiple))


def _boundaries(blocks: AttentionBlocks) -> tuple[Tensor, Tensor, int, int]:
    return blocks.cu_seqlens_q, blocks.cu_seqlens_k, blocks.max_seqlen_q, blocks.max_seqlen_k


def _cuda_flash(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Any]:
    out, lse, *state = torch.ops.aten._flash_attention_forward(
        q, k, v, cu_q, cu_k, max_q, max_k, 0.0, causal, False, scale=scale
    )
    return out, lse, state


def _cuda_flash_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    # Without dropout the kernel reads no random state, but its schema wants two tensors of one.
    unused = torch.empty(2, dtype=torch.uint64, device=q.device)
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        grad, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, 0.0, causal, unused, unused, scale=scale
    )
    return dq, dk, dv


def choose_kernel(q: Tensor) -> Kernel:
    """The kernel for a device and dtype.

    Raises:
        UnsupportedAttentionError: a device for which there is none.
    """
    if q.device.type == "cpu":
        return CPUFlashKernel()
    if q.device.type == "cuda":
        half = q.dtype in (torch.float16, torch.bfloat16)
        return VarlenKernel(_cuda_flash, _cuda_flash_backward, head_multiple=8) if half else ReferenceKernel()
    raise UnsupportedAttentionError(f"no attention kernel for device {q.device}; there are kernels for CPU and CUDA")
