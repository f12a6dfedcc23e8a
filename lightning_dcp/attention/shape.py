"""What one attention call looks like: its heads and numbers, and how scores come from queries and keys."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class AttentionShape:
    """The heads of one attention layer.

    Attributes:
        heads: query heads, H.
        kv_heads: key and value heads, H_kv; divides ``heads``.
        head_dim: width of a query's or key's head, D.
        v_head_dim: width of a value's head, D_v.
        dtype: of queries, keys and values.
        device: the kind of device, such as ``cpu``.
    """

    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: torch.dtype
    device: str = "cpu"

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor) -> AttentionShape:
        """The shape of a call with these tensors, ``[tokens, heads, head_dim]`` each."""
        return cls(q.shape[1], k.shape[1], q.shape[2], v.shape[2], q.dtype, q.device.type)

    @property
    def wide(self) -> torch.dtype:
        """What results of several blocks are added up in: float32 or better."""
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def q_numbers(self) -> int:
        """Numbers of a token's queries."""
        return self.heads * self.head_dim

    @property
    def out_numbers(self) -> int:
        """Numbers of a token's outputs."""
        return self.heads * self.v_head_dim

    @property
    def kv_numbers(self) -> int:
        """Numbers of a token's keys and values."""
        return self.kv_heads * (self.head_dim + self.v_head_dim)

    @property
    def forward_bytes(self) -> int:
        """Bytes of the keys and values of one token."""
        return self.kv_numbers * self.dtype.itemsize

    @property
    def backward_bytes(self) -> int:
        """Bytes of the keys and values of one token and of their gradients, which travel in float32 or better."""
        return self.forward_bytes + self.kv_numbers * self.wide.itemsize


@dataclass(frozen=True)
class Scores:
    """How scores come from products of queries and keys.

    Attributes:
        scale: factor of the products.
        softcap: c in ``c * tanh(scale * q.k / c)``, which keeps scores within -c .. c (https://arxiv.org/abs/2408.00118);
            0 for none.
    """

    scale: float
    softcap: float = 0.0
