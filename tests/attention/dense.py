"""What is attended to, and plain softmax attention of each sample alone, as in a textbook, to compare with."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor, nn

from lightning_dcp.attention import AttentionKind
from lightning_dcp.parallel.blocks import AttentionMask
from tests.parallel.support import sample_slices


@dataclass(frozen=True)
class Inputs:
    """What is attended to.

    Attributes:
        lengths: tokens of each sample of the pack.
        heads: of queries.
        kv_heads: of keys and values.
        head_dim: width of queries and keys; no multiple of 8 by default, so that kernels that need one have to pad.
        v_head_dim: width of values.
        source: where q, k and v come from: ``gaussian`` numbers, or projections of a random ``mlp``'s activations.
        dtype: of q, k and v.
        first_sample: ``kept``, or ``other`` or ``nan`` values for the first sample's q, k, v and gradient.
    """

    lengths: tuple[int, ...]
    kv_heads: int = 2
    source: str = "gaussian"
    dtype: torch.dtype = torch.float64
    first_sample: str = "kept"
    heads: int = 4
    head_dim: int = 6
    v_head_dim: int = 6


@dataclass(frozen=True)
class Kind:
    """A kind of attention; ``causal`` may be ``mixed``: every other sample is, and the first one is not."""

    causal: bool | str = True
    window_size: tuple[int, int] = (-1, -1)
    scale: float | None = None
    softcap: float = 0.0
    sinks: bool = False

    def causal_of(self, sample: int) -> bool:
        """Whether a sample is causal."""
        return sample % 2 == 1 if self.causal == "mixed" else bool(self.causal)

    def attention_kind(self, inputs: Inputs, sinks: Tensor | None = None) -> AttentionKind:
        """As the engine takes it."""
        mixed = tuple(self.causal_of(sample) for sample in range(len(inputs.lengths)))
        mask = AttentionMask(mixed if self.causal == "mixed" else bool(self.causal), self.window_size)
        return AttentionKind(mask, self.scale, self.softcap, sinks)


CAUSAL = Kind()
KINDS = {
    "causal": CAUSAL,
    "bidirectional": Kind(False),
    "some samples causal": Kind("mixed"),
    "window of the token itself": Kind(window_size=(0, 0)),
    "small window": Kind(window_size=(3, 0)),
    "window larger than most samples": Kind(window_size=(99, 0)),
    "window on both sides": Kind(False, (5, 2)),
    "window on the right alone": Kind(False, (-1, 4)),
    "window on the left alone": Kind(False, (6, -1)),
    "windows, some samples causal": Kind("mixed", (9, 3)),
    "scale": Kind(scale=0.9),
    "soft-cap": Kind(softcap=1.5),
    "sinks": Kind(sinks=True),
    "everything at once": Kind("mixed", (11, 5), 0.7, 2.0, sinks=True),
}


@lru_cache(maxsize=64)
def make_inputs(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and the gradient of the output, for the whole pack."""
    generator = torch.Generator().manual_seed(sum(inputs.lengths) + inputs.kv_heads)
    tokens, q_width, v_width = sum(inputs.lengths), inputs.heads * inputs.head_dim, inputs.kv_heads * inputs.v_head_dim
    widths = q_width, inputs.kv_heads * inputs.head_dim, v_width
    if inputs.source == "mlp":
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(tokens)
            mlp = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 16), nn.LayerNorm(16)).double()
            projection = nn.Linear(16, sum(widths)).double()
        hidden = mlp(torch.rand(tokens, 8, dtype=torch.float64, generator=generator))
        parts = [2 * part for part in projection(hidden).detach().split(widths, dim=1)]
    else:
        parts = [torch.randn(tokens, width, dtype=torch.float64, generator=generator) for width in widths]
    parts.append(torch.randn(tokens, inputs.heads * inputs.v_head_dim, dtype=torch.float64, generator=generator))
    if inputs.first_sample != "kept":
        for part in parts:
            first = part[: inputs.lengths[0]]
            noise = torch.randn(first.shape, dtype=torch.float64, generator=generator)
            first.copy_(torch.full_like(first, math.nan) if inputs.first_sample == "nan" else noise)
    sizes = inputs.head_dim, inputs.head_dim, inputs.v_head_dim, inputs.v_head_dim
    q, k, v, grad = (p.unflatten(1, (-1, n)).to(inputs.dtype).contiguous() for p, n in zip(parts, sizes, strict=True))
    return q, k, v, grad


def make_sinks(inputs: Inputs) -> Tensor:
    """A score for each query head."""
    return torch.linspace(-1.0, 1.5, inputs.heads, dtype=inputs.dtype)


@lru_cache(maxsize=256)
def dense_attention(inputs: Inputs, kind: Kind = CAUSAL) -> dict[str, np.ndarray]:
    """Output and gradients of plain softmax attention in float64, each sample alone: ``out, dq, dk, dv`` (``dsinks``).

    They are those of ``inputs`` in their own dtype, which is rounded before it is widened.
    """
    whole = [t.double() for t in make_inputs(inputs)]
    sinks = make_sinks(inputs).double().requires_grad_() if kind.sinks else None
    parts = []
    for sample, where in enumerate(sample_slices(inputs.lengths)):
        *leaves, grad = (t[where] for t in whole)
        leaves = [t.clone().requires_grad_() for t in leaves]
        out = plain_attention(*leaves, kind, kind.causal_of(sample), sinks)
        wanted = leaves if sinks is None else [*leaves, sinks]
        parts.append([out.detach(), *torch.autograd.grad(out, wanted, grad)])
    arrays = {name: torch.cat([p[i] for p in parts]).numpy() for i, name in enumerate(("out", "dq", "dk", "dv"))}
    return arrays if sinks is None else arrays | {"dsinks": sum(part[4] for part in parts).numpy()}


def plain_attention(
    q: Tensor, k: Tensor, v: Tensor, kind: Kind = CAUSAL, causal: bool = True, sinks: Tensor | None = None
) -> Tensor:
    """Softmax attention of one sample, ``[n, heads, head_dim]``, with a mask as wide as it is long."""
    group = q.shape[1] // k.shape[1]
    keys, values = (t.repeat_interleave(group, 1).transpose(0, 1) for t in (k, v))
    scores = q.transpose(0, 1) @ keys.mT * (q.shape[-1] ** -0.5 if kind.scale is None else kind.scale)
    if kind.softcap:
        scores = kind.softcap * torch.tanh(scores / kind.softcap)
    at = torch.arange(len(q))
    before = at[:, None] - at[None, :]  # how many tokens the key lies before the query
    left, right = kind.window_size
    seen = torch.ones_like(before, dtype=torch.bool)
    if causal:
        seen &= before >= 0
    if left >= 0:
        seen &= before <= left
    if right >= 0:
        seen &= -before <= right
    scores = scores.masked_fill(~seen, -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, len(q), 1)], dim=-1)
    return (scores.softmax(-1)[..., : len(q)] @ values).transpose(0, 1)
