"""Kernels for GPUs, on a machine without one: dense stand-ins under the real signatures check what they are handed."""

import importlib.machinery
import math
import sys
import types
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from lightning_dcp.attention.kernels import KERNELS, flash_attn, flash_attn_3, varlen_attn
from lightning_dcp.attention.shape import AttentionShape, Scores
from lightning_dcp.parallel.blocks import AttentionBlock, AttentionBlocks, AttentionMask, BlockKind, attention_blocks
from lightning_dcp.parallel.layout import build_layout

CPU = torch.device("cpu")
HALF = AttentionShape(4, 2, 64, 64, torch.bfloat16, "cuda")
PLAIN = Scores(0.125)


# --- what a kernel is handed, and the same by dense products


class Call(NamedTuple):
    """One call: forward or backward, whether causal, and whether the backward is to be deterministic."""

    backward: bool
    causal: bool
    deterministic: bool | None = None


CALLS: list[Call] = []
"""Calls since the test began."""


@pytest.fixture(autouse=True)
def _fresh():
    CALLS.clear()
    for lookup in (flash_attn._package_problem, flash_attn_3._package_problem, varlen_attn._operator_problem):
        lookup.cache_clear()
    yield
    for lookup in (flash_attn._package_problem, flash_attn_3._package_problem, varlen_attn._operator_problem):
        lookup.cache_clear()


def segments(q, k, v, cu_q, cu_k, max_q, max_k, causal):
    """What flash_api.cpp demands of packed tensors, and then the segments."""
    assert q.dim() == k.dim() == v.dim() == 3 and k.shape == v.shape and q.shape[2] == k.shape[2]
    assert q.shape[2] % 8 == 0 and q.shape[2] <= 256 and q.shape[1] % k.shape[1] == 0
    assert q.dtype == k.dtype == v.dtype and all(t.is_contiguous() for t in (q, k, v, cu_q, cu_k))
    assert cu_q.dtype == cu_k.dtype == torch.int32 and cu_q.shape == cu_k.shape and cu_q.dim() == 1
    assert (cu_q[0], cu_k[0], cu_q[-1], cu_k[-1]) == (0, 0, len(q), len(k))
    sizes_q, sizes_k = cu_q.diff().tolist(), cu_k.diff().tolist()
    assert min(sizes_q) > 0 and min(sizes_k) > 0 and (max(sizes_q), max(sizes_k)) == (max_q, max_k)
    assert isinstance(causal, bool) and (not causal or sizes_q == sizes_k)
    ends_q, ends_k = cu_q.tolist(), cu_k.tolist()
    return [(slice(*ends_q[i : i + 2]), slice(*ends_k[i : i + 2])) for i in range(len(sizes_q))]


def wide(x):
    return torch.promote_types(x.dtype, torch.float32)


def heads_first(x, heads):
    """``[n, H_kv, D]`` to ``[H, n, D]`` in float32 or better."""
    return x.to(wide(x)).transpose(0, 1).repeat_interleave(heads // x.shape[1], 0)


def capped_scores(q, k, causal, scale, softcap):
    points = heads_first(q, q.shape[1]) @ heads_first(k, q.shape[1]).mT * scale
    points = softcap * torch.tanh(points / softcap) if softcap else points
    hidden = torch.ones(points.shape[1:], dtype=torch.bool).triu(1) & causal
    return points.masked_fill(hidden, -math.inf)


def dense_forward(q, k, v, cu_q, cu_k, max_q, max_k, causal, scale, softcap=0.0):
    CALLS.append(Call(False, causal))
    out, lse = torch.full_like(q, math.nan), torch.full((q.shape[1], len(q)), math.nan, dtype=wide(q))
    for rows, keys in segments(q, k, v, cu_q, cu_k, max_q, max_k, causal):
        points = capped_scores(q[rows], k[keys], causal, scale, softcap)
        lse[:, rows] = points.logsumexp(-1)
        out[rows] = (points.softmax(-1) @ heads_first(v[keys], q.shape[1])).transpose(0, 1).to(q.dtype)
    return out, lse


def dense_backward(
    grad, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, causal, scale, softcap=0.0, deterministic=None
):  # fmt: skip
    CALLS.append(Call(True, causal, deterministic))
    assert grad.shape == out.shape == q.shape and grad.dtype == out.dtype == q.dtype
    assert grad.is_contiguous() and out.is_contiguous()
    assert lse.shape == (q.shape[1], len(q)) and lse.dtype == wide(q) and lse.is_contiguous()
    dq, dk, dv = (torch.full_like(t, math.nan) for t in (q, k, v))
    heads = q.shape[1]
    for rows, keys in segments(q, k, v, cu_q, cu_k, max_q, max_k, causal):
        points = capped_scores(q[rows], k[keys], causal, scale, softcap)
        weights = (points - lse[:, rows, None]).exp()
        g, o = heads_first(grad[rows], heads), heads_first(out[rows], heads)
        slopes = weights * (g @ heads_first(v[keys], heads).mT - (g * o).sum(-1, keepdim=True)) * scale
        if softcap:
            slopes = slopes * (1 - (points.masked_fill(weights == 0, 0) / softcap) ** 2)
        dq[rows] = (slopes @ heads_first(k[keys], heads)).transpose(0, 1).to(q.dtype)
        dk[keys] = (
            (slopes.mT @ heads_first(q[rows], heads)).unflatten(0, (k.shape[1], -1)).sum(1).transpose(0, 1).to(q.dtype)
        )
        dv[keys] = (weights.mT @ g).unflatten(0, (k.shape[1], -1)).sum(1).transpose(0, 1).to(q.dtype)
    return dq, dk, dv


# --- torch: CPU implementations of the real operators, so that torch itself checks the calls against its schema


def aten_forward(
    query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask,
    *, scale=None, window_size_left=None, window_size_right=None, **unused,
):  # fmt: skip
    assert dropout_p == 0.0 and return_debug_mask is False and scale is not None
    assert window_size_left in (None, -1) and window_size_right in (None, -1)
    assert all(value is None for value in unused.values())
    out, lse = dense_forward(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, is_causal, scale)
    random = torch.empty(2, dtype=torch.uint64)
    return out, lse, random, torch.empty((), dtype=torch.uint64), torch.empty(0)


def aten_backward(
    grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, rng_state,
    unused, *, scale=None, window_size_left=None, window_size_right=None,
):  # fmt: skip
    assert dropout_p == 0.0 and scale is not None and rng_state.shape == (2,) and rng_state.dtype == torch.uint64
    assert window_size_left in (None, -1) and window_size_right in (None, -1)
    return dense_backward(
        grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, is_causal, scale
    )


@pytest.fixture
def torch_ops():
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_flash_attention_forward", aten_forward, "CPU")
        library.impl("_flash_attention_backward", aten_backward, "CPU")
        yield


# --- flash-attn: the signatures of 2.7.0 (flash_attn/flash_attn_interface.py), and of 2.7.3 to 2.8.3


def flash_forward_2_7_0(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
    window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False, block_table=None,
    leftpad_k=None, seqused_k=None,
):  # fmt: skip
    assert dropout_p == 0.0 and (window_size_left, window_size_right) == (-1, -1) and not return_softmax
    assert (alibi_slopes, block_table, leftpad_k, seqused_k) == (None,) * 4
    out, lse = dense_forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, softmax_scale, softcap
    )
    return out, lse, torch.empty(0), torch.empty(2, dtype=torch.int64)


def flash_backward_2_7_0(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
    softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic, rng_state=None,
):  # fmt: skip
    assert dropout_p == 0.0 and (window_size_left, window_size_right) == (-1, -1)
    assert (alibi_slopes, rng_state) == (None, None) and isinstance(deterministic, bool)
    grads = dense_backward(
        dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, softmax_scale,
        softcap, deterministic,
    )  # fmt: skip
    for given, grad in zip((dq, dk, dv), grads, strict=True):
        given.copy_(grad)
    return torch.empty(0)


def flash_forward_2_8_3(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
    window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False, block_table=None,
    leftpad_k=None, seqused_k=None, zero_tensors=False,
):  # fmt: skip
    assert not zero_tensors
    return flash_forward_2_7_0(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size_left, window_size_right, softcap, alibi_slopes, return_softmax, block_table, leftpad_k, seqused_k,
    )  # fmt: skip


def flash_backward_2_8_3(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
    softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic, rng_state=None,
    zero_tensors=False,
):  # fmt: skip
    assert not zero_tensors
    return flash_backward_2_7_0(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
        softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic, rng_state,
    )  # fmt: skip


def add_module(monkeypatch, name, **contents):
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    for key, value in contents.items():
        setattr(module, key, value)
    monkeypatch.setitem(sys.modules, name, module)


def add_flash_attn(monkeypatch, version, forward, backward):
    add_module(monkeypatch, "flash_attn", __version__=version)
    names = {"_flash_attn_varlen_forward": forward, "_flash_attn_varlen_backward": backward}
    add_module(monkeypatch, "flash_attn.flash_attn_interface", **names)


@pytest.fixture
def flash_attn_2_7(monkeypatch):
    add_flash_attn(monkeypatch, "2.7.0", flash_forward_2_7_0, flash_backward_2_7_0)


@pytest.fixture
def flash_attn_2_8(monkeypatch):
    add_flash_attn(monkeypatch, "2.8.3", flash_forward_2_8_3, flash_backward_2_8_3)


# --- FlashAttention 3: hopper/flash_attn_interface.py at the tags v2.8.0 to v2.8.3 (3.0.0b1), and of 3.0.0, which wraps
# its functions by torch.library.custom_op


def flash_3_forward_b1(
    q, k, v, k_new, v_new, qv, out, cu_seqlens_q, cu_seqlens_k, cu_seqlens_k_new, seqused_q, seqused_k, max_seqlen_q,
    max_seqlen_k, page_table, kv_batch_idx, leftpad_k, rotary_cos, rotary_sin, seqlens_rotary, q_descale, k_descale,
    v_descale, softmax_scale, causal, window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True,
    scheduler_metadata=None, num_splits=1, pack_gqa=None, sm_margin=0,
):  # fmt: skip
    assert window_size == (-1, -1) and attention_chunk == 0 and num_splits == 1
    unused = (k_new, v_new, qv, out, cu_seqlens_k_new, seqused_q, seqused_k, page_table, kv_batch_idx, leftpad_k)
    assert all(value is None for value in (*unused, rotary_cos, rotary_sin, seqlens_rotary))
    assert all(value is None for value in (q_descale, k_descale, v_descale, scheduler_metadata, pack_gqa))
    out, lse = dense_forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, softmax_scale, softcap
    )
    return out, lse, None, None


def flash_3_backward_b1(
    dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, sequed_q, sequed_k, max_seqlen_q, max_seqlen_k, dq, dk,
    dv, softmax_scale, causal, window_size=(-1, -1), softcap=0.0, deterministic=False, sm_margin=0,
):  # fmt: skip
    assert window_size == (-1, -1) and (sequed_q, sequed_k) == (None, None)
    grads = dense_backward(
        dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, softmax_scale,
        softcap, deterministic,
    )  # fmt: skip
    for given, grad in zip((dq, dk, dv), grads, strict=True):
        given.copy_(grad)
    return dq, dk, dv, torch.empty(0)


@torch.library.custom_op("lightning_dcp_tests::flash_3_forward", mutates_args=())
def flash_3_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    qv: Tensor | None = None,
    out_: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    page_table: Tensor | None = None,
    kv_batch_idx: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    seqlens_rotary: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    assert (window_size_left, window_size_right) == (-1, -1)
    out, lse, _, _ = flash_3_forward_b1(
        q, k, v, k_new, v_new, qv, out_, cu_seqlens_q, cu_seqlens_k, cu_seqlens_k_new, seqused_q, seqused_k,
        max_seqlen_q, max_seqlen_k, page_table, kv_batch_idx, leftpad_k, rotary_cos, rotary_sin, seqlens_rotary,
        q_descale, k_descale, v_descale, softmax_scale, causal, softcap=softcap,
    )  # fmt: skip
    return out, lse, torch.empty(0), torch.empty(0)


@torch.library.custom_op("lightning_dcp_tests::flash_3_backward", mutates_args=("dq", "dk", "dv"))
def flash_3_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    sequed_q: Tensor | None = None,
    sequed_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    deterministic: bool = False,
    sm_margin: int = 0,
) -> Tensor:
    assert (window_size_left, window_size_right) == (-1, -1)
    *_, rest = flash_3_backward_b1(
        dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, sequed_q, sequed_k, max_seqlen_q, max_seqlen_k, dq,
        dk, dv, softmax_scale, is_causal, softcap=softcap, deterministic=deterministic,
    )  # fmt: skip
    return rest


@pytest.fixture
def flash_attn_3_b1(monkeypatch):
    names = {"_flash_attn_forward": flash_3_forward_b1, "_flash_attn_backward": flash_3_backward_b1}
    add_module(monkeypatch, "flash_attn_interface", **names)


@pytest.fixture
def flash_attn_3_0(monkeypatch):
    names = {"_flash_attn_forward": flash_3_forward, "_flash_attn_backward": flash_3_backward}
    add_module(monkeypatch, "flash_attn_interface", **names)


# --- results

STANDS_IN = {
    "torch_ops": ("cuda_flash", "varlen_attn"),
    "flash_attn_2_7": ("flash_attn",),
    "flash_attn_2_8": ("flash_attn",),
    "flash_attn_3_b1": ("flash_attn_3",),
    "flash_attn_3_0": ("flash_attn_3",),
}
EACH = pytest.mark.parametrize(
    ("stand_in", "name"), [(stand_in, name) for stand_in, names in STANDS_IN.items() for name in names]
)
LENGTHS = (9, 1, 6)
MASKS = {
    "causal": (AttentionMask(), {BlockKind.LOWER}),
    "bidirectional": (AttentionMask(causal=False), {BlockKind.FULL}),
    "window": (AttentionMask(window_size=(3, 0)), {BlockKind.LOWER, BlockKind.FULL, BlockKind.UPPER}),
}


def plain_attention(q, k, v, mask, scores):
    """By one matrix of scores over the whole pack, as in a textbook."""
    first, last = (torch.from_numpy(bound) for bound in mask.bounds(LENGTHS))
    at = torch.arange(len(k))
    seen = (at >= first[:, None]) & (at <= last[:, None])
    group = q.shape[1] // k.shape[1]
    points = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1)) * scores.scale
    points = scores.softcap * torch.tanh(points / scores.softcap) if scores.softcap else points
    weights = points.masked_fill(~seen, -math.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(group, 1))


def whole_attention(kernel, q, k, v, grad, mask, scores):
    """All groups of blocks, joined by their logsumexps: outputs and gradients in float32 or better."""
    groups = attention_blocks(build_layout("zigzag", LENGTHS, 1), None, None, mask, CPU)
    dtype = wide(q)
    out = torch.zeros(len(q), q.shape[1], v.shape[2], dtype=dtype)
    lse = torch.full(q.shape[:2], -math.inf, dtype=dtype)
    for blocks in groups:
        for rows, part, part_lse in kernel.forward(q, k, v, blocks, scores):
            total = torch.logaddexp(lse[rows], part_lse)
            old, new = (lse[rows] - total).exp(), (part_lse - total).exp()
            out[rows] = out[rows] * old[..., None] + part.to(dtype) * new[..., None]
            lse[rows] = total
    grads = [torch.zeros(t.shape, dtype=dtype) for t in (q, k, v)]
    for blocks in groups:
        for rows, keys, *parts in kernel.backward(grad, q, k, v, out.to(q.dtype), lse, blocks, scores):
            for whole, where, part in zip(grads, (rows, keys, keys), parts, strict=True):
                whole.index_add_(0, where, part.to(dtype))
    return {blocks.kind for blocks in groups}, [out, *grads]


def check_whole(name, dtype, mask_name, widths, scores, tolerance):
    torch.manual_seed(3)
    mask, kinds = MASKS[mask_name]
    sizes = [(4, widths[0]), (2, widths[0]), (2, widths[1]), (4, widths[1])]
    q, k, v, grad = (torch.randn(sum(LENGTHS), *size, dtype=torch.float64).to(dtype) for size in sizes)
    found, got = whole_attention(KERNELS[name], q, k, v, grad, mask, scores)
    leaves = [t.double().requires_grad_() for t in (q, k, v)]
    out = plain_attention(*leaves, mask, scores)
    expected = [out, *torch.autograd.grad(out, leaves, grad.double())]
    assert kinds <= found  # where a block is both, such as one of one token, either kind will do
    for value, wanted in zip(got, expected, strict=True):
        assert (value.double() - wanted).abs().max() < tolerance


@EACH
@pytest.mark.parametrize("mask_name", MASKS)
@pytest.mark.parametrize("widths", [(16, 16), (6, 6), (24, 16), (5, 12)])
def test_joined_blocks_are_plain_attention_in_float64(request, stand_in, name, mask_name, widths):
    request.getfixturevalue(stand_in)
    check_whole(name, torch.float64, mask_name, widths, Scores(0.3), 1e-12)
    assert {call.backward for call in CALLS} == {False, True}


@EACH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_joined_blocks_are_plain_attention_in_the_dtypes_of_training(request, stand_in, name, dtype):
    request.getfixturevalue(stand_in)
    check_whole(name, dtype, "window", (16, 8), Scores(0.3), 1e-5 if dtype is torch.float32 else 0.1)


@pytest.mark.parametrize("stand_in", ["flash_attn_2_7", "flash_attn_2_8", "flash_attn_3_b1", "flash_attn_3_0"])
@pytest.mark.parametrize("mask_name", MASKS)
def test_scores_are_capped(request, stand_in, mask_name):
    request.getfixturevalue(stand_in)
    check_whole(STANDS_IN[stand_in][0], torch.float64, mask_name, (8, 8), Scores(0.5, softcap=1.5), 1e-12)


@EACH
def test_only_triangles_are_causal_and_each_kind_is_one_call(request, stand_in, name):
    request.getfixturevalue(stand_in)
    check_whole(name, torch.float64, "window", (8, 8), PLAIN, 1e-12)
    triangles_and_full = [False, True, True]  # causal: lower and upper triangles
    for backward in (False, True):
        assert sorted(call.causal for call in CALLS if call.backward is backward) == triangles_and_full


@pytest.mark.parametrize("stand_in", ["flash_attn_2_7", "flash_attn_2_8", "flash_attn_3_b1", "flash_attn_3_0"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_the_backward_is_deterministic_where_torch_is(request, stand_in, deterministic):
    request.getfixturevalue(stand_in)
    torch.use_deterministic_algorithms(deterministic)
    try:
        check_whole(STANDS_IN[stand_in][0], torch.float64, "bidirectional", (8, 8), PLAIN, 1e-12)
    finally:
        torch.use_deterministic_algorithms(False)
    assert [call.deterministic for call in CALLS if call.backward] == [deterministic]


@EACH
def test_tensors_of_any_layout_in_memory_are_handed_over_contiguous(request, stand_in, name):
    request.getfixturevalue(stand_in)
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(h, 12, 8, dtype=torch.float64).transpose(0, 1) for h in (4, 2, 2, 4))
    blocks = AttentionBlocks(BlockKind.FULL, (AttentionBlock(2, 7, 0, 12),), CPU)
    ((rows, out, lse),) = KERNELS[name].forward(q, k, v, blocks, PLAIN)
    whole_out, whole_lse = torch.zeros_like(grad), torch.zeros(4, 12, dtype=torch.float64).transpose(0, 1)
    whole_out[rows], whole_lse[rows] = out, lse
    ((_, keys, *grads),) = KERNELS[name].backward(grad, q, k, v, whole_out, whole_lse, blocks, PLAIN)
    assert rows.tolist() == [2, 3, 4, 5, 6] and keys.tolist() == list(range(12))
    assert [t.shape for t in grads] == [(5, 4, 8), (12, 2, 8), (12, 2, 8)]


def test_a_wrong_keyword_would_fail(torch_ops, flash_attn_2_8, flash_attn_3_b1):
    """The stand-ins are no catch-alls."""
    x = torch.zeros(1, 1, 8)
    with pytest.raises((RuntimeError, TypeError)):
        torch.ops.aten._flash_attention_forward(x, x, x, None, None, 1, 1, 0.0, False, False, softmax_scale=1.0)
    for module, name in (
        ("flash_attn.flash_attn_interface", "_flash_attn_varlen_backward"),
        ("flash_attn_interface", "_flash_attn_forward"),
    ):
        with pytest.raises(TypeError):
            getattr(sys.modules[module], name)(scale=1.0)


# --- refusals


@pytest.fixture
def gpu(monkeypatch):
    """A machine with an H100 and a torch built for it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", None)
    set_capability(monkeypatch, 9, 0)


def set_capability(monkeypatch, major, minor):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (major, minor))


def shaped(**changes):
    return AttentionShape(**{**HALF.__dict__, **changes})


ALL = ("flash_attn_3", "flash_attn", "cuda_flash", "varlen_attn")


def test_a_complete_machine_refuses_nothing(gpu, flash_attn_2_8, flash_attn_3_0):
    assert [KERNELS[name].refusal(HALF, PLAIN) for name in ALL] == [None] * 4


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    ("changes", "scores", "words"),
    [
        ({"device": "cpu"}, PLAIN, "it runs on cuda"),
        ({"dtype": torch.float32}, PLAIN, "torch.float32"),
        ({"head_dim": 264}, PLAIN, "256"),
    ],
)
def test_calls_that_no_flash_kernel_takes_are_refused(
    gpu, flash_attn_2_8, flash_attn_3_0, name, changes, scores, words
):
    assert words in KERNELS[name].refusal(shaped(**changes), scores)


def test_only_the_packages_cap_scores(gpu, flash_attn_2_8, flash_attn_3_0):
    refused = [name for name in ALL if KERNELS[name].refusal(HALF, Scores(1.0, softcap=30.0))]
    assert refused == ["cuda_flash", "varlen_attn"]


@pytest.mark.parametrize("name", ALL)
def test_a_device_that_is_missing_too_old_or_of_another_make_is_refused(
    gpu, flash_attn_2_8, flash_attn_3_0, monkeypatch, name
):
    with monkeypatch.context() as patch:
        set_capability(patch, 7, 5)
        assert "the device has 7.5" in KERNELS[name].refusal(HALF, PLAIN)
    with monkeypatch.context() as patch:
        patch.setattr(torch.version, "hip", "6.4")
        assert "ROCm" in KERNELS[name].refusal(HALF, PLAIN)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "no CUDA device" in KERNELS[name].refusal(HALF, PLAIN)


def test_flash_attention_3_is_for_hopper(gpu, flash_attn_3_0, monkeypatch):
    set_capability(monkeypatch, 8, 0)
    assert "9.0" in KERNELS["flash_attn_3"].refusal(HALF, PLAIN)
    set_capability(monkeypatch, 10, 0)
    assert "Hopper" in KERNELS["flash_attn_3"].refusal(HALF, PLAIN)


def test_flash_attention_3_refuses_wide_heads_where_torch_is_deterministic(gpu, flash_attn_3_0):
    torch.use_deterministic_algorithms(True)
    try:
        assert KERNELS["flash_attn_3"].refusal(shaped(head_dim=192), PLAIN) is None
        assert "deterministic" in KERNELS["flash_attn_3"].refusal(shaped(head_dim=193), PLAIN)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", ["cuda_flash", "varlen_attn"])
def test_small_devices_lack_one_range_of_head_sizes(gpu, monkeypatch, name):
    wide_heads = [shaped(head_dim=width) for width in (192, 200, 224, 232)]
    assert [KERNELS[name].refusal(shape, PLAIN) for shape in wide_heads] == [None] * 4
    for capability in ((8, 6), (8, 9), (12, 0)):
        set_capability(monkeypatch, *capability)
        assert [bool(KERNELS[name].refusal(shape, PLAIN)) for shape in wide_heads] == [False, True, True, False]


@pytest.mark.parametrize("name", ["cuda_flash", "varlen_attn"])
def test_a_torch_without_flash_attention_is_refused(gpu, monkeypatch, name):
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: False)
    assert "built without" in KERNELS[name].refusal(HALF, PLAIN)


def test_a_torch_without_the_varlen_module_is_refused(gpu, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", None)
    assert "2.10" in KERNELS["varlen_attn"].refusal(HALF, PLAIN)
    assert KERNELS["cuda_flash"].refusal(HALF, PLAIN) is None


def test_an_operator_without_a_scale_is_refused(gpu, monkeypatch):
    import torch.nn.attention.varlen

    operator = types.SimpleNamespace(default=types.SimpleNamespace(_schema=types.SimpleNamespace(arguments=[])))
    monkeypatch.setattr(torch.ops, "torch_attn", types.SimpleNamespace(_varlen_attn=operator))
    assert "no scale" in KERNELS["varlen_attn"].refusal(HALF, PLAIN)


@pytest.mark.parametrize(("name", "module"), [("flash_attn", "flash_attn"), ("flash_attn_3", "flash_attn_interface")])
def test_packages_that_are_absent_or_broken_are_refused(gpu, monkeypatch, name, module):
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert "not installed" in KERNELS[name].refusal(HALF, PLAIN)
    flash_attn._package_problem.cache_clear()
    flash_attn_3._package_problem.cache_clear()
    monkeypatch.setattr(importlib.util, "find_spec", lambda found: importlib.machinery.ModuleSpec(found, None))
    assert "cannot be imported" in KERNELS[name].refusal(HALF, PLAIN)


@pytest.mark.parametrize(
    ("version", "refused"), [("2.6.3", True), ("1.0.9", True), ("2.7.0.post2", False), ("2.10.1", False)]
)
def test_old_releases_of_flash_attn_are_refused(gpu, monkeypatch, version, refused):
    add_flash_attn(monkeypatch, version, flash_forward_2_7_0, flash_backward_2_7_0)
    assert bool(KERNELS["flash_attn"].refusal(HALF, PLAIN)) is refused
