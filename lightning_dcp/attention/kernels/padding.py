"""Head sizes for kernels that take only some: zeros at the end of a head change no score and no other output."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from lightning_dcp.attention.shape import AttentionShape


def common_width(shape: AttentionShape, multiple: int = 1) -> int:
    """The width to which queries, keys and values are padded together."""
    widest = max(shape.head_dim, shape.v_head_dim)
    return -(-widest // multiple) * multiple


def pad_heads(x: Tensor, width: int) -> Tensor:
    """``[..., D]`` to ``[..., width]``."""
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))
