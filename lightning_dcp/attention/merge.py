"""Joining attention over different keys: by the logsumexp of each part."""

from __future__ import annotations

import torch
from torch import Tensor


def merge_(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> None:
    """Join two partial results of the same queries, in place in the first.

    With ``lse = log(e^a + e^b)``, the outputs weigh ``e^(a - lse)`` and ``e^(b - lse)``, that is ``1 - w`` and ``w``
    for ``w = sigmoid(b - a)``: stable for any difference, where ``log(1 + exp(x))`` would overflow. The rule is the
    online softmax of https://arxiv.org/abs/1805.02867.

    Args:
        out: ``[n, H, D]``, float32 or float64, overwritten.
        lse: ``[n, H]``, overwritten.
        other_out: ``[n, H, D]``, any float type.
        other_lse: ``[n, H]``.
    """
    weight = torch.sigmoid(other_lse - lse)
    out.lerp_(other_out.to(out.dtype), weight.unsqueeze(-1))
    torch.logaddexp(lse, other_lse, out=lse)
