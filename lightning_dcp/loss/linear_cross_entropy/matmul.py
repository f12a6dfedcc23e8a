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
def _can_widen(device: torch.device) -> bool:
    """Whether ``torch.mm`` takes ``out_dtype`` there: NVIDIA GPUs since Ampere, since torch 2.8."""
    if device.type != "cuda" or torch.version.hip is not None or not hasattr(torch.ops.aten.mm, "dtype"):
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def operand_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """What operands are held in: half precision where the product comes out in float32 nevertheless, else float32.

    In the second case half-precision weights are there once more in float32, in forward and backward.
    """
    return dtype if dtype in HALF and _can_widen(device) else wide_dtype(dtype)


def wide_matmul(a: Tensor, b: Tensor) -> Tensor:
    """``a [m, k] @ b [k, n]`` in float32 or better; both in the same dtype (:func:`operand_dtype`)."""
    if a.dtype in HALF:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a @ b
