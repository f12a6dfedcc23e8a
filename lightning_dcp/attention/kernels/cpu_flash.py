"""torch's flash attention for CPU."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lightning_dcp.attention.kernels.base import BackwardPart, ForwardPart, Kernel
from lightning_dcp.attention.kernels.padding import common_width, pad_heads
from lightning_dcp.attention.shape import AttentionShape, Scores
from lightning_dcp.parallel.blocks import AttentionBlock, AttentionBlocks, BlockKind

_GROUPED_BACKWARD = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2]) >= (2, 13)
"""Whether the backward is known to take grouped key heads: torch 2.7 writes beyond its memory there."""
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class CPUFlashKernel(Kernel):
    """One call a block; an upper triangle is a lower one read from the last token to the first.

    Half precision is computed in float32: torch's kernel would round each part to it, and parts of many hops add up.
    """

    name = "cpu_flash"

    def refusal(self, shape: AttentionShape, scores: Scores) -> str | None:  # noqa: D102
        if shape.device != "cpu":
            return f"it runs on CPU, not on {shape.device}"
        if shape.dtype not in _DTYPES:
            return f"it has no {shape.dtype}"
        if scores.scale <= 0:
            return "it takes scales above 0 only"  # it hides scores before it scales them
        return "it has no soft-cap" if scores.softcap else None

    def forward(  # noqa: D102
        self, q: Tensor, k: Tensor, v: Tensor, blocks: AttentionBlocks, scores: Scores
    ) -> Iterator[ForwardPart]:
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        width, wanted = common_width(AttentionShape.of(q, k, v)), v.shape[-1]
        queries, keys, values = (_heads_first(pad_heads(t, width)) for t in (q, k, v))
        for block in blocks.blocks:
            own, other = _takers(block, blocks.kind)
            out, lse = flash(own(queries), other(keys), other(values), 0.0, blocks.causal, scale=scores.scale)
            if blocks.kind is BlockKind.UPPER:
                out, lse = out.flip(2), lse.flip(2)
            yield block.queries, out[0].transpose(0, 1)[..., :wanted], lse[0].transpose(0, 1)

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
        flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        width, widths = common_width(AttentionShape.of(q, k, v)), (q.shape[-1], k.shape[-1], v.shape[-1])
        group = 1 if _GROUPED_BACKWARD else q.shape[1] // k.shape[1]
        k, v = (t.repeat_interleave(group, 1) if group > 1 else t for t in (k, v))
        grad, q, k, v, out = (_heads_first(pad_heads(t, width)) for t in (grad, q, k, v, out))
        lse = lse.transpose(0, 1).unsqueeze(0)
        for block in blocks.blocks:
            own, other = _takers(block, blocks.kind)
            of_queries = own(grad), own(q), other(k), other(v), own(out), own(lse)
            grads = flash_backward(*of_queries, 0.0, blocks.causal, scale=scores.scale)
            if blocks.kind is BlockKind.UPPER:
                grads = [g.flip(2) for g in grads]
            dq, dk, dv = (g[0].transpose(0, 1)[..., :w] for g, w in zip(grads, widths, strict=True))
            if group > 1:
                dk, dv = (g.unflatten(1, (-1, group)).sum(2) for g in (dk, dv))
            yield block.queries, block.keys, dq, dk, dv


class _Taker:
    """Takes a block's tokens out of ``[1, H, T, ...]``, in the order in which the kernel reads them."""

    def __init__(self, tokens: slice, *, backwards: bool) -> None:
        self._tokens, self._backwards = tokens, backwards

    def __call__(self, x: Tensor) -> Tensor:
        part = x[:, :, self._tokens]
        part = part.to(torch.promote_types(part.dtype, torch.float32))
        return part.flip(2) if self._backwards else part


def _takers(block: AttentionBlock, kind: BlockKind) -> tuple[_Taker, _Taker]:
    backwards = kind is BlockKind.UPPER
    return _Taker(block.queries, backwards=backwards), _Taker(block.keys, backwards=backwards)


def _heads_first(x: Tensor) -> Tensor:
    """``[T, H, D]`` to ``[1, H, T, D]``."""
    return x.transpose(0, 1).unsqueeze(0)
