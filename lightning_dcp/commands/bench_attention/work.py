"""One rank's part of an attention call, forward and backward by any scheme, without autograd."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_dcp.attention.kernels import KERNELS
from lightning_dcp.attention.schemes import ALONE, SCHEMES, AttentionCall
from lightning_dcp.attention.schemes.base import Gradients, Saved, Scheme
from lightning_dcp.commands.bench_attention.cases import DTYPES, Setting
from lightning_dcp.parallel.context import CPContext, make_context
from lightning_dcp.parallel.exchange import Exchange
from lightning_dcp.parallel.groups import CPGroup

ONE_RANK = "one rank"
"""In place of a scheme: the whole pack on one rank."""


class Times(NamedTuple):
    """Seconds of one rank, or of all of them taken together."""

    forward_s: float
    backward_s: float
    both_s: float


class Inputs(NamedTuple):
    """Tensors of a call: ``q [T, H, D]``, ``k`` and ``v [T, H_kv, D]``, the output's gradient, ``sinks [H]`` or None."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor
    sinks: Tensor | None

    def take(self, index: Tensor) -> Inputs:
        """Those of some tokens, as tensors of their own."""
        return Inputs(self.q[index], self.k[index], self.v[index], self.grad[index], self.sinks)

    def to(self, dtype: torch.dtype) -> Inputs:
        """The same in another dtype."""
        return Inputs(*(None if x is None else x.to(dtype) for x in self))  # type: ignore[arg-type]


def draw_inputs(setting: Setting, device: torch.device) -> Inputs:
    """Random tensors of the whole pack; the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    tokens, dtype = sum(setting.pack.lengths), DTYPES[setting.dtype]

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    q, grad = (draw(tokens, setting.heads, setting.head_dim) for _ in range(2))
    k, v = (draw(tokens, setting.kv_heads, setting.head_dim) for _ in range(2))
    return Inputs(q, k, v, grad, draw(setting.heads) if setting.kind.sinks else None)


def alone(setting: Setting, device: torch.device) -> CPContext:
    """The context of one rank that has the whole pack."""
    return make_context(CPGroup(None, (0,)), 0, setting.pack.lengths, device=device)


def shared(setting: Setting, group: CPGroup, device: torch.device, exchange: Exchange) -> CPContext:
    """The context of one rank of a group."""
    return make_context(
        group, exchange.rank, setting.pack.lengths, layout=setting.layout, device=device, exchange=exchange
    )


@dataclasses.dataclass(frozen=True)
class Work:
    """What one rank does.

    Attributes:
        call: the call, with its context.
        inputs: of this rank's tokens.
    """

    call: AttentionCall
    inputs: Inputs

    @classmethod
    def of(cls, setting: Setting, context: CPContext, pack: Inputs) -> Work:
        """The work of the context's rank."""
        kernel = KERNELS[setting.kernel]
        call = AttentionCall(context, setting.shape, setting.kind.mask, setting.scores, kernel)
        return cls(call, pack.take(context.pack_index))

    def forward(self, scheme: str) -> tuple[Tensor, Saved]:
        """The outputs, and what the backward needs."""
        q, k, v, _, sinks = self.inputs
        return self._scheme(scheme).forward(self.call, q, k, v, sinks)

    def backward(self, scheme: str, saved: Saved) -> Gradients:
        """The gradients, rounded as autograd gets them."""
        inputs = self.inputs
        *grads, dsinks = self._scheme(scheme).backward(self.call, inputs.grad, saved, inputs.sinks)
        dq, dk, dv = (g.to(inputs.q.dtype) for g in grads if g is not None)
        return dq, dk, dv, dsinks

    def _scheme(self, name: str) -> Scheme:
        return SCHEMES[ALONE if name == ONE_RANK else name]
