"""A plain PyTorch decoder: it knows nothing of context parallelism.

Read top to bottom: norm, rotary positions, attention, feed-forward, block, model.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class RMSNorm(nn.Module):
    """Root-mean-square norm, https://arxiv.org/abs/1910.07467."""

    def __init__(self, size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def rotary_tables(position_ids: Tensor, head_dim: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of RoPE (https://arxiv.org/abs/2104.09864) for positions ``[B, T]``: two ``[B, 1, T, D/2]``."""
    wide = torch.promote_types(dtype, torch.float32)
    frequencies = base ** (-torch.arange(0, head_dim, 2, device=position_ids.device, dtype=wide) / head_dim)
    angles = position_ids.unsqueeze(1).unsqueeze(-1).to(wide) * frequencies
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the two halves of the last dimension of ``[B, H, T, D]``."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Attention(nn.Module):
    """Causal self-attention with grouped key and value heads, https://arxiv.org/abs/2305.13245."""

    def __init__(self, hidden_size: int, num_heads: int, num_kv_heads: int) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.head_dim = hidden_size // num_heads
        self.qkv = nn.Linear(hidden_size, (num_heads + 2 * num_kv_heads) * self.head_dim, bias=False)
        self.out = nn.Linear(num_heads * self.head_dim, hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """``[B, T, hidden]`` to the same."""
        heads = self.qkv(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        q, k, v = heads.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.num_heads != self.num_kv_heads)
        return self.out(mixed.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    """SwiGLU, https://arxiv.org/abs/2002.05202."""

    def __init__(self, hidden_size: int, ffn_hidden_size: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(hidden_size, 2 * ffn_hidden_size, bias=False)
        self.down = nn.Linear(ffn_hidden_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``[B, T, hidden]`` to the same."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    """Attention and feed-forward, each with a norm before and a residual around it."""

    def __init__(self, hidden_size: int, num_heads: int, num_kv_heads: int, ffn_hidden_size: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(hidden_size)
        self.attention = Attention(hidden_size, num_heads, num_kv_heads)
        self.ffn_norm = RMSNorm(hidden_size)
        self.ffn = FeedForward(hidden_size, ffn_hidden_size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """``[B, T, hidden]`` to the same."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.ffn(self.ffn_norm(x))


class Decoder(nn.Module):
    """A small causal language model.

    Args:
        vocab_size: entries of the vocabulary.
        hidden_size: width; a multiple of ``2 * num_heads``.
        num_layers: blocks.
        num_heads: query heads.
        num_kv_heads: key and value heads; divides ``num_heads`` (default: as many).
        ffn_hidden_size: width of the feed-forward (default: 8/3 of the hidden size, rounded up to a multiple of 32).
        tie_embeddings: use the embedding as the head.
        rope_base: base of the rotary frequencies.
    """

    def __init__(
        self,
        vocab_size: int = 258,
        *,
        hidden_size: int = 128,
        num_layers: int = 4,
        num_heads: int = 4,
        num_kv_heads: int | None = None,
        ffn_hidden_size: int | None = None,
        tie_embeddings: bool = True,
        rope_base: float = 10_000.0,
    ) -> None:
        super().__init__()
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if hidden_size % (2 * num_heads) or num_heads % kv_heads:
            raise ValueError(
                f"hidden_size={hidden_size} must be a multiple of 2 * num_heads={2 * num_heads}, and num_heads a "
                f"multiple of num_kv_heads={kv_heads}"
            )
        ffn = ffn_hidden_size or -(-8 * hidden_size // 3 // 32) * 32
        self.head_dim, self.rope_base = hidden_size // num_heads, rope_base
        self.embedding = nn.Embedding(vocab_size, hidden_size)
        self.blocks = nn.ModuleList([Block(hidden_size, num_heads, kv_heads, ffn) for _ in range(num_layers)])
        self.norm = RMSNorm(hidden_size)
        self.head = nn.Linear(hidden_size, vocab_size, bias=False)
        self.apply(_initialize)
        if tie_embeddings:
            self.head.weight = self.embedding.weight

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """Token ids ``[B, T]`` and their positions (0, 1, 2, ... by default) to logits ``[B, T, vocab]``."""
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        x = self.embedding(input_ids)
        cos, sin = rotary_tables(position_ids, self.head_dim, self.rope_base, x.dtype)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))


def _initialize(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
