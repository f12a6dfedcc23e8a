"""Attention sinks: a learned score of each head that takes weight from the keys and gives no value.

As in https://arxiv.org/abs/2508.10925: softmax over a query's scores and its head's sink, without the sink's column.
"""

from __future__ import annotations

import torch
from torch import Tensor


def apply_sinks_(out: Tensor, lse: Tensor, sinks: Tensor | None) -> None:
    """Join every query's result with its head's sink, in place: a key of this score and of value 0.

    Args:
        out: ``[n, H, D_v]``.
        lse: ``[n, H]``.
        sinks: ``[H]``, or None for none.
    """
    if sinks is not None:
        total = torch.logaddexp(lse, sinks.to(lse.dtype))
        out.mul_((lse - total).exp().unsqueeze(-1))
        lse.copy_(total)


def sink_gradient(grad: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None) -> Tensor | None:
    """The gradient of the sinks by these queries, ``[H]`` in lse's dtype; out and lse are those with the sinks.

    A score's gradient is ``weight * (its value's product with grad - out's product with grad)``; a sink's value is 0.
    """
    if sinks is None:
        return None
    delta = (grad.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    return -((sinks.to(lse.dtype) - lse).exp() * delta).sum(0)
