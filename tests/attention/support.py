"""Attention on ranks and in one process, to compare."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_dcp.attention import ring_attention
from lightning_dcp.attention.kernels import CPUFlashKernel, Kernel, ReferenceKernel, VarlenKernel
from lightning_dcp.parallel.context import CPContext, make_context
from lightning_dcp.parallel.groups import ParallelGroups
from lightning_dcp.parallel.layout import PackLayout
from tests.parallel.support import join_world, random_layout, sample_slices
from tests.support.ranks import RankPool

QUERY_HEADS = 4
HEAD_SIZE = 6  # no multiple of 8, so that kernels that need one have to pad


@dataclass(frozen=True)
class Inputs:
    """What is attended to.

    Attributes:
        lengths: tokens of each sample of the pack.
        kv_heads: heads of keys and values.
        source: where q, k and v come from: ``gaussian`` numbers, or projections of a random ``mlp``'s activations.
        dtype: of q, k and v.
        first_sample: ``kept``, or ``other`` or ``nan`` values for q, k and v of the first sample.
    """

    lengths: tuple[int, ...]
    kv_heads: int = 2
    source: str = "gaussian"
    dtype: torch.dtype = torch.float64
    first_sample: str = "kept"


@dataclass(frozen=True)
class Case:
    """One attention call, forward and backward, on one group.

    Attributes:
        inputs: what is attended to.
        size: ranks of the group.
        layout: a layout's name, or ``random``.
        kernel: a name in ``KERNELS``, or None for the default.
        scale: factor of the scores.
        transposed: whether q, k, v and the gradient of the output are views of heads-first tensors.
    """

    inputs: Inputs
    size: int
    layout: str = "zigzag"
    kernel: str | None = None
    scale: float | None = None
    transposed: bool = False

    def pack_layout(self) -> str | PackLayout:
        lengths = self.inputs.lengths
        return random_layout(lengths, self.size, seed=sum(lengths)) if self.layout == "random" else self.layout


@dataclass(frozen=True)
class Attended:
    """Output and gradients of a whole pack, by the names ``out``, ``dq``, ``dk`` and ``dv``; and their dtypes."""

    arrays: dict[str, np.ndarray]
    dtypes: frozenset[torch.dtype]


Round = dict[int, Case]
"""What groups do at one time, by their first rank; ranks in none of them are idle."""


@lru_cache(maxsize=64)
def make_inputs(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and the gradient of the output, for the whole pack."""
    torch.manual_seed(sum(inputs.lengths) + inputs.kv_heads)
    tokens, heads = sum(inputs.lengths), (QUERY_HEADS, inputs.kv_heads, inputs.kv_heads)
    if inputs.source == "mlp":
        mlp = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 16), nn.LayerNorm(16)).double()
        hidden = mlp(torch.rand(tokens, 8, dtype=torch.float64))
        projection = nn.Linear(16, sum(heads) * HEAD_SIZE).double()
        parts = [2 * part for part in projection(hidden).detach().unflatten(1, (-1, HEAD_SIZE)).split(heads, dim=1)]
    else:
        parts = [torch.randn(tokens, h, HEAD_SIZE, dtype=torch.float64) for h in heads]
    grad = torch.randn(tokens, QUERY_HEADS, HEAD_SIZE, dtype=torch.float64)
    if inputs.first_sample != "kept":
        for part in parts:
            first = part[: inputs.lengths[0]]
            first.copy_(torch.full_like(first, math.nan) if inputs.first_sample == "nan" else torch.randn_like(first))
    q, k, v, grad = (t.to(inputs.dtype) for t in (*parts, grad))
    return q, k, v, grad


# --- on ranks


def attend(case: Case, context: CPContext) -> dict[str, Any]:
    """This rank's share of a case, and where it lies in the pack."""
    q, k, v, grad = (t[context.pack_index] for t in make_inputs(case.inputs))
    if case.transposed:
        q, k, v, grad = (t.transpose(0, 1).contiguous().transpose(0, 1) for t in (q, k, v, grad))
        assert not q.is_contiguous() and not grad.is_contiguous()
    for t in (q, k, v):
        t.requires_grad_()
    kernel = None if case.kernel is None else KERNELS[case.kernel]
    out = ring_attention(q, k, v, context, scale=case.scale, kernel=kernel)
    return share_of(context, out, torch.autograd.grad(out, (q, k, v), grad))


def share_of(context: CPContext, out: Tensor, grads: Sequence[Tensor]) -> dict[str, Any]:
    """Output and gradients of q, k and v of one rank, to be joined with those of the others."""
    tensors = dict(zip(("out", "dq", "dk", "dv"), (out, *grads), strict=True))
    return {
        "index": context.pack_index.numpy(),
        "arrays": {name: t.detach().double().numpy() for name, t in tensors.items()},
        "dtypes": {t.dtype for t in tensors.values()},
    }


def attend_in_rounds(rounds: Sequence[Round]) -> list[dict[str, Any] | None]:
    """A job: this rank's share of each round, None where it was idle."""
    groups = join_world()
    return [_attend_in(round_, groups) for round_ in rounds]


def _attend_in(round_: Round, groups: ParallelGroups) -> dict[str, Any] | None:
    for first, case in round_.items():
        if first <= groups.rank < first + case.size:
            group = groups.cp_group(first, case.size)
            layout = case.pack_layout()
            return attend(case, make_context(group, groups.rank - first, case.inputs.lengths, layout=layout))
    return None


def attend_on(ranks: RankPool, world: int, rounds: Sequence[Round]) -> Iterator[tuple[Case, Attended]]:
    """Run rounds; give each case with what its ranks computed together."""
    shares = ranks.run(attend_in_rounds, world, rounds)
    for i, round_ in enumerate(rounds):
        for first, case in round_.items():
            yield case, join_shares(case, [shares[rank][i] for rank in range(first, first + case.size)])


def join_shares(case: Case, shares: Sequence[dict[str, Any]]) -> Attended:
    """What the ranks of one group computed together, in the pack's order."""
    index = np.concatenate([share["index"] for share in shares])
    order = np.argsort(index)
    assert (index[order] == np.arange(sum(case.inputs.lengths))).all()
    names = shares[0]["arrays"]
    arrays = {name: np.concatenate([share["arrays"][name] for share in shares])[order] for name in names}
    return Attended(arrays, frozenset().union(*(share["dtypes"] for share in shares)))


# --- in one process


def assert_as_dense(case: Case, got: Attended, tolerance: float = 1e-10) -> None:
    """Output and gradients are those of plain softmax attention, sample by sample."""
    expected = dense_attention(case.inputs, case.scale)
    for sample, where in enumerate(sample_slices(case.inputs.lengths)):
        for name, whole in expected.items():
            error = np.abs(got.arrays[name][where] - whole[where]).max()
            assert error <= tolerance, f"{name} of sample {sample} is off by {error}: {case}"


@lru_cache(maxsize=64)
def dense_attention(inputs: Inputs, scale: float | None = None) -> dict[str, np.ndarray]:
    """Output and gradients of plain softmax attention in float64, each sample alone."""
    whole = [t.double() for t in make_inputs(inputs)]
    parts = [_dense_sample(*(t[where] for t in whole), scale) for where in sample_slices(inputs.lengths)]
    return {name: np.concatenate([part[i] for part in parts]) for i, name in enumerate(("out", "dq", "dk", "dv"))}


def _dense_sample(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, scale: float | None) -> list[np.ndarray]:
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    out = plain_attention(*leaves, scale)
    return [t.detach().numpy() for t in (out, *torch.autograd.grad(out, leaves, grad))]


def plain_attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    """Causal softmax attention of one sample, ``[n, heads, head size]``, as in a textbook."""
    group = q.shape[1] // k.shape[1]
    outs = []
    for head in range(q.shape[1]):
        scores = q[:, head] @ k[:, head // group].T * (scale or q.shape[-1] ** -0.5)
        visible = torch.ones_like(scores, dtype=torch.bool).tril()
        outs.append(scores.masked_fill(~visible, -math.inf).softmax(-1) @ v[:, head // group])
    return torch.stack(outs, 1)


# --- a variable-length kernel as on CUDA: packed segments, results rounded to q's dtype, no head size but multiples of 8


def _varlen_run(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Any]:
    out, lse = torch.empty_like(q), torch.empty(q.shape[1], q.shape[0], dtype=_wide(q))
    for rows, keys in _segments(q, k, v, cu_q, cu_k, max_q, max_k, causal):
        scores, _, values = _segment(q[rows], k[keys], v[keys], causal, scale)
        lse[:, rows] = scores.logsumexp(-1)
        out[rows] = (scores.softmax(-1) @ values).transpose(0, 1).to(q.dtype)
    return out, lse, None


def _varlen_run_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    assert grad.shape == out.shape == q.shape and grad.dtype == out.dtype == q.dtype
    assert lse.shape == (q.shape[1], q.shape[0]) and lse.dtype == _wide(q) and lse.is_contiguous()
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    for rows, keys in _segments(q, k, v, cu_q, cu_k, max_q, max_k, causal):
        scores, all_keys, values = _segment(q[rows], k[keys], v[keys], causal, scale)
        weights = (scores - lse[:, rows, None]).exp()
        g, o = (t[rows].transpose(0, 1).to(scores.dtype) for t in (grad, out))
        dscores = weights * (g @ values.mT - (g * o).sum(-1, keepdim=True)) * scale
        dq[rows] = (dscores @ all_keys).transpose(0, 1).to(q.dtype)
        dk[keys] = _shared(dscores.mT @ q[rows].transpose(0, 1).to(scores.dtype), k).to(k.dtype)
        dv[keys] = _shared(weights.mT @ g, v).to(v.dtype)
    return dq, dk, dv


def _segments(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, causal: bool
) -> Iterator[tuple[slice, slice]]:
    """What the kernel demands of its arguments, and then its segments."""
    assert q.dim() == k.dim() == v.dim() == 3 and k.shape == v.shape and q.shape[2] == k.shape[2]
    assert q.shape[2] % 8 == 0 and q.shape[1] % k.shape[1] == 0
    assert cu_q.dtype == cu_k.dtype == torch.int32 and len(cu_q) == len(cu_k)
    ends_q, ends_k = cu_q.tolist(), cu_k.tolist()
    assert (ends_q[0], ends_k[0], ends_q[-1], ends_k[-1]) == (0, 0, len(q), len(k))
    sizes_q, sizes_k = cu_q.diff().tolist(), cu_k.diff().tolist()
    assert min(sizes_q) > 0 and min(sizes_k) > 0 and (max(sizes_q), max(sizes_k)) == (max_q, max_k)
    assert not causal or sizes_q == sizes_k
    for i in range(len(sizes_q)):
        yield slice(ends_q[i], ends_q[i + 1]), slice(ends_k[i], ends_k[i + 1])


def _segment(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Scores of one segment, and its keys and values for each query head; heads first, in float32 or better."""
    keys, values = (t.transpose(0, 1).repeat_interleave(q.shape[1] // k.shape[1], 0).to(_wide(q)) for t in (k, v))
    scores = q.transpose(0, 1).to(_wide(q)) @ keys.mT * scale
    if causal:
        scores = scores + torch.full(scores.shape[1:], -math.inf, dtype=scores.dtype).triu(1)
    return scores, keys, values


def _shared(per_query_head: Tensor, like: Tensor) -> Tensor:
    """``[H, n, D]`` summed over the query heads that share a key head, ``[n, H_kv, D]``."""
    return per_query_head.unflatten(0, (like.shape[1], -1)).sum(1).transpose(0, 1)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


KERNELS: dict[str, Kernel] = {
    "flash": CPUFlashKernel(),
    "reference": ReferenceKernel(),
    "varlen": VarlenKernel(_varlen_run, _varlen_run_backward, head_multiple=8),
}
