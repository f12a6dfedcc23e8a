"""Matrix products of half-precision operands with float32 results."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)
"""Dtypes whose products and statistics are kept in float32."""


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32, or float64 for float64: what logits, statistics and gradients are computed in."""
    return torch.promote_types(dtype, torch.float32)


@cache
def _can_widen() -> bool:
    """Whether ``torch.mm`` takes ``out_dtype`` (CUDA only, since torch 2.8)."""
    return hasattr(torch.ops.aten.mm, "dtype")


def operand_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """What operands are held in: half precision where the product comes out in float32 nevertheless, else float32."""
    return dtype if device.type == "cuda" and _can_widen() else wide_dtype(dtype)


def wide_matmul(a: Tensor, b: Tensor) -> Tensor:
    """``a [m, k] @ b [k, n]`` in float32 or better; both in the same dtype (:func:`operand_dtype`)."""
    if a.dtype in HALF:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a @ b
