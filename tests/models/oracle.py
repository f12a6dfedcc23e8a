"""What Hugging Face models are compared with: dense attention in the inputs' own precision, and no casts to float32."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

DENSE = "dense_of_the_tests"
"""The name of this attention in transformers."""


def dense(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Softmax attention by the book, in the inputs' precision (transformers' own casts its softmax to float32)."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(2, 3) * (1 / math.sqrt(query.shape[-1]) if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if attention_mask is None:
        raise AssertionError("the mask function below always makes a mask")
    scores = scores + attention_mask
    if s_aux is not None:
        sinks = s_aux.reshape(1, -1, 1, 1).expand(scores.shape[0], -1, scores.shape[2], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = scores.softmax(-1)[..., : key.shape[2]]
    return (weights @ value).transpose(1, 2).contiguous(), weights


def dense_mask(*args: Any, **options: Any) -> Tensor:
    """The mask that transformers makes for its own eager attention, 0 and the lowest number, ``[B, 1, T, T]``."""
    options["allow_is_bidirectional_skip"] = False
    return ALL_MASK_ATTENTION_FUNCTIONS["eager"](*args, **options)


AttentionInterface.register(DENSE, dense)
AttentionMaskInterface.register(DENSE, dense_mask)


_WIDE = torch.float64
_float, _to, _type = Tensor.float, Tensor.to, Tensor.type
_softmax, _tensor_softmax, _functional = torch.softmax, Tensor.softmax, F.softmax


@contextmanager
def without_casts() -> Iterator[None]:
    """Casts to float32 leave float64 as it is, and make float64 of whole numbers.

    Models of transformers normalise, rotate, route and compute losses in float32 whatever their weights are. It is there for
    16-bit weights; with 64-bit ones it rounds, and rounded numbers of two runs that scale a pack's loss differently agree
    to 1e-7 at best.
    """

    def float_(x: Tensor) -> Tensor:
        return _float(x) if x.is_floating_point() and x.dtype != _WIDE else _to(x, _WIDE)

    def to(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if x.dtype == _WIDE:
            args = tuple(_WIDE if a is torch.float32 else a for a in args)
            kwargs = {name: _WIDE if a is torch.float32 else a for name, a in kwargs.items()}
        return _to(x, *args, **kwargs)

    def type_(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return x if x.dtype == _WIDE and args == (torch.float32,) else _type(x, *args, **kwargs)

    def widened(softmax: Any) -> Any:
        def function(x: Tensor, *args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Tensor:
            dtype = None if x.dtype == _WIDE and dtype is torch.float32 else dtype
            return softmax(x, *args, dtype=dtype, **kwargs)

        return function

    with (
        patch.object(Tensor, "float", float_),
        patch.object(Tensor, "to", to),
        patch.object(Tensor, "type", type_),
        patch.object(torch, "softmax", widened(_softmax)),
        patch.object(Tensor, "softmax", widened(_tensor_softmax)),
        patch.object(F, "softmax", widened(_functional)),
    ):
        yield
