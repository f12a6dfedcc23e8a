"""Ulysses: each rank gets all tokens of some of the heads.

After Jacobs et al., https://arxiv.org/abs/2309.14509; grouped key heads that several ranks need go to each of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_dcp.attention.schemes.base import AttentionCall, Gradients, Saved, Scheme, attend, attend_backward
from lightning_dcp.attention.schemes.heads import HeadExchange


class Ulysses(Scheme):
    """Two all-to-alls forward, two backward; whole samples in one block, as far as there are heads for the ranks."""

    name = "ulysses"

    def forward(  # noqa: D102
        self, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
    ) -> tuple[Tensor, Saved]:
        heads = HeadExchange(call.context, call.shape)
        own = _Keys(heads)
        q, k, v = heads.gather_tokens(q, k, v)
        k, v = own.spread(k), own.spread(v)
        own_sinks = None if sinks is None else sinks[heads.own_heads]
        out, lse = attend(call, q, k, v, own_sinks, call.blocks(None, None) if q.shape[1] else ())
        return heads.scatter_outputs(out), (q, k, v, out, lse)

    def backward(self, call: AttentionCall, grad: Tensor, saved: Saved, sinks: Tensor | None) -> Gradients:  # noqa: D102
        heads = HeadExchange(call.context, call.shape)
        own = _Keys(heads)
        own_sinks = None if sinks is None else sinks[heads.own_heads]
        blocks = call.blocks(None, None) if saved[0].shape[1] else ()
        dq, dk, dv, own_dsinks = attend_backward(call, heads.gather_outputs(grad), saved, own_sinks, blocks)
        dsinks = None
        if sinks is not None and own_dsinks is not None:
            dsinks = own_dsinks.new_zeros(sinks.shape)
            dsinks[heads.own_heads] = own_dsinks
        return *heads.scatter_gradients(dq, own.collect(dk), own.collect(dv)), dsinks


class _Keys:
    """Key heads as kernels want them: even groups of query heads, or one key head for each query head."""

    def __init__(self, heads: HeadExchange) -> None:
        self._places = heads.split.key_of_each(heads.context.rank)

    def spread(self, x: Tensor) -> Tensor:
        """``[T, key heads, D]`` as it is, or one for each query head."""
        return x if self._places is None else x[:, self._places]

    def collect(self, x: Tensor) -> Tensor:
        """The gradient of what :meth:`spread` was given."""
        if self._places is None:
            return x
        total = x.new_zeros(len(x), self._places[-1] + 1, x.shape[-1])
        return total.index_add_(1, torch.tensor(self._places, device=x.device), x)
