"""Plain matrix products, a tile of queries at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_dcp.attention.kernels.base import BackwardPart, ForwardPart, Kernel
from lightning_dcp.attention.shape import AttentionShape, Scores
from lightning_dcp.parallel.blocks import AttentionBlocks, BlockKind

_TILE_SCORES = 1 << 22
"""Scores of one tile over all heads: some tens of megabytes, whatever the samples' lengths are."""


class ReferenceKernel(Kernel):
    """Any dtype, device, head size and soft-cap: what other kernels are tested against, and what serves where none fits."""

    name = "reference"

    def refusal(self, shape: AttentionShape, scores: Scores) -> str | None:  # noqa: D102
        return None

    def forward(  # noqa: D102
        self, q: Tensor, k: Tensor, v: Tensor, blocks: AttentionBlocks, scores: Scores
    ) -> Iterator[ForwardPart]:
        for tile in _tiles(blocks, q.shape[1]):
            points = _capped(_products(q, k, tile, scores), scores)
            points = _hide(points, tile)
            lse = points.logsumexp(-1)
            weights = (points - lse.unsqueeze(-1)).exp()
            out = torch.einsum("hgqk,khd->qhgd", weights, v[tile.keys].to(weights.dtype)).flatten(1, 2)
            yield tile.queries, out, lse.flatten(0, 1).transpose(0, 1)

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
        kv_heads = k.shape[1]
        for tile in _tiles(blocks, q.shape[1]):
            points = _capped(_products(q, k, tile, scores), scores)
            wide = points.dtype
            queries, g, o = (_grouped(t[tile.queries].to(wide), kv_heads) for t in (q, grad, out))
            keys, values = k[tile.keys].to(wide), v[tile.keys].to(wide)
            total = lse[tile.queries].transpose(0, 1).unflatten(0, (kv_heads, -1)).unsqueeze(-1)
            weights = (_hide(points, tile) - total).exp()
            delta = (g * o).sum(-1).permute(1, 2, 0).unsqueeze(-1)
            slopes = weights * (torch.einsum("qhgd,khd->hgqk", g, values) - delta) * scores.scale
            if scores.softcap:
                slopes = slopes * (1 - (points / scores.softcap) ** 2)
            dq = torch.einsum("hgqk,khd->qhgd", slopes, keys).flatten(1, 2)
            dk = torch.einsum("hgqk,qhgd->khd", slopes, queries)
            dv = torch.einsum("hgqk,qhgd->khd", weights, g)
            yield tile.queries, tile.keys, dq, dk, dv


class _Tile(NamedTuple):
    """Some queries of a block and the keys that any of them sees; ``first`` is the first query's place in the block."""

    queries: slice
    keys: slice
    kind: BlockKind
    first: int


def _tiles(blocks: AttentionBlocks, heads: int) -> Iterator[_Tile]:
    for block in blocks.blocks:
        rows = max(1, _TILE_SCORES // (heads * (block.k_end - block.k_start)))
        for start in range(block.q_start, block.q_end, rows):
            end, first = min(start + rows, block.q_end), start - block.q_start
            keys = {
                BlockKind.FULL: slice(block.k_start, block.k_end),
                BlockKind.LOWER: slice(block.k_start, block.k_start + first + end - start),
                BlockKind.UPPER: slice(block.k_start + first, block.k_end),
            }[blocks.kind]
            yield _Tile(slice(start, end), keys, blocks.kind, first)


def _grouped(x: Tensor, kv_heads: int) -> Tensor:
    """``[n, H, D]`` to ``[n, H_kv, heads a group, D]``."""
    return x.unflatten(1, (kv_heads, -1))


def _products(q: Tensor, k: Tensor, tile: _Tile, scores: Scores) -> Tensor:
    """Scaled products ``[H_kv, heads a group, queries, keys]``, in float32 or better."""
    wide = torch.promote_types(q.dtype, torch.float32)
    queries = _grouped(q[tile.queries].to(wide), k.shape[1])
    return torch.einsum("qhgd,khd->hgqk", queries, k[tile.keys].to(wide)) * scores.scale


def _capped(products: Tensor, scores: Scores) -> Tensor:
    return scores.softcap * torch.tanh(products / scores.softcap) if scores.softcap else products


def _hide(points: Tensor, tile: _Tile) -> Tensor:
    """Scores with -inf where a query does not see a key of the tile."""
    if tile.kind is BlockKind.FULL:
        return points
    unseen = torch.ones(points.shape[2:], dtype=torch.bool, device=points.device)
    # in a lower triangle the tile's keys start at the block's first, in an upper one at the tile's own first
    unseen = unseen.triu(tile.first + 1) if tile.kind is BlockKind.LOWER else unseen.tril(-1)
    return points.masked_fill(unseen, -math.inf)
