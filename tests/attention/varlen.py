"""A variable-length kernel as on CUDA: packed segments, results rounded to q's dtype, no head size but multiples of 8."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor

from lightning_dcp.attention.kernels.varlen import VarlenArguments, VarlenKernel


class PlainVarlenKernel(VarlenKernel):
    """Plain products, segment by segment; demands of its arguments what kernels on CUDA demand.

    Attributes:
        calls: how often it was called, forward and backward.
    """

    name = "varlen"
    has_softcap = True
    device: ClassVar[str] = "cpu"
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

    def __init__(self) -> None:
        self.calls = {"forward": 0, "backward": 0}

    def missing(self) -> str | None:
        return None

    def run(self, q: Tensor, k: Tensor, v: Tensor, arguments: VarlenArguments) -> tuple[Tensor, Tensor]:
        self.calls["forward"] += 1
        out, lse = torch.empty_like(q), torch.empty(q.shape[1], q.shape[0], dtype=_wide(q))
        for rows, keys in _segments(q, k, v, arguments):
            scores, _, values = _segment(q[rows], k[keys], v[keys], arguments)
            lse[:, rows] = scores.logsumexp(-1)
            out[rows] = (scores.softmax(-1) @ values).transpose(0, 1).to(q.dtype)
        return out, lse

    def run_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, arguments: VarlenArguments
    ) -> tuple[Tensor, Tensor, Tensor]:
        self.calls["backward"] += 1
        assert grad.shape == out.shape == q.shape and grad.dtype == out.dtype == q.dtype
        assert lse.shape == (q.shape[1], q.shape[0]) and lse.dtype == _wide(q) and lse.is_contiguous()
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        for rows, keys in _segments(q, k, v, arguments):
            scores, all_keys, values = _segment(q[rows], k[keys], v[keys], arguments)
            weights = (scores - lse[:, rows, None]).exp()
            g, o = (t[rows].transpose(0, 1).to(scores.dtype) for t in (grad, out))
            slopes = weights * (g @ values.mT - (g * o).sum(-1, keepdim=True)) * arguments.scale
            if arguments.softcap:  # where nothing is seen the score is -inf and the weight 0
                slopes = slopes * (1 - (scores.nan_to_num(neginf=0.0) / arguments.softcap) ** 2)
            dq[rows] = (slopes @ all_keys).transpose(0, 1).to(q.dtype)
            dk[keys] = _shared(slopes.mT @ q[rows].transpose(0, 1).to(scores.dtype), k).to(k.dtype)
            dv[keys] = _shared(weights.mT @ g, v).to(v.dtype)
        return dq, dk, dv


def _segments(q: Tensor, k: Tensor, v: Tensor, arguments: VarlenArguments) -> Iterator[tuple[slice, slice]]:
    """What the kernel demands of its arguments, and then its segments."""
    cu_q, cu_k = arguments.cu_seqlens_q, arguments.cu_seqlens_k
    assert q.dim() == k.dim() == v.dim() == 3 and k.shape == v.shape and q.shape[2] == k.shape[2]
    assert q.shape[2] % 8 == 0 and k.shape[1] > 0 and q.shape[1] % k.shape[1] == 0
    assert cu_q.dtype == cu_k.dtype == torch.int32 and len(cu_q) == len(cu_k)
    ends_q, ends_k = cu_q.tolist(), cu_k.tolist()
    assert (ends_q[0], ends_k[0], ends_q[-1], ends_k[-1]) == (0, 0, len(q), len(k))
    sizes_q, sizes_k = cu_q.diff().tolist(), cu_k.diff().tolist()
    assert min(sizes_q) > 0 and min(sizes_k) > 0
    assert (max(sizes_q), max(sizes_k)) == (arguments.max_seqlen_q, arguments.max_seqlen_k)
    assert not arguments.causal or sizes_q == sizes_k
    for i in range(len(sizes_q)):
        yield slice(ends_q[i], ends_q[i + 1]), slice(ends_k[i], ends_k[i + 1])


def _segment(q: Tensor, k: Tensor, v: Tensor, arguments: VarlenArguments) -> tuple[Tensor, Tensor, Tensor]:
    """Scores of one segment, and its keys and values for each query head; heads first, in float32 or better."""
    keys, values = (t.transpose(0, 1).repeat_interleave(q.shape[1] // k.shape[1], 0).to(_wide(q)) for t in (k, v))
    scores = q.transpose(0, 1).to(_wide(q)) @ keys.mT * arguments.scale
    if arguments.softcap:
        scores = arguments.softcap * torch.tanh(scores / arguments.softcap)
    if arguments.causal:
        scores = scores + torch.full(scores.shape[1:], -math.inf, dtype=scores.dtype).triu(1)
    return scores, keys, values


def _shared(per_query_head: Tensor, like: Tensor) -> Tensor:
    """``[H, n, D]`` summed over the query heads that share a key head, ``[n, H_kv, D]``."""
    return per_query_head.unflatten(0, (like.shape[1], -1)).sum(1).transpose(0, 1)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
