"""Attention as models call it: outside a region each row is a sample; inside, the pack's samples."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_dcp.attention import attention
from lightning_dcp.attention.options import AttentionOptions
from lightning_dcp.attention.sdpa import ContextParallelAttention
from lightning_dcp.errors import UnsupportedAttentionError
from tests.attention.dense import KINDS, Inputs, Kind, make_inputs, make_sinks, plain_attention
from tests.attention.support import SCHEMES, join_shares, share_of
from tests.parallel.support import join_world, own_context, sample_slices
from tests.support.ranks import RankPool

ROWS = Inputs((13, 13, 13), v_head_dim=5)
"""Three samples of one length, as a batch has them."""
SERVED = {name: kind for name, kind in KINDS.items() if kind.causal != "mixed"} | {
    "all but mixed": Kind(True, (4, 0), 0.7, 2.0, sinks=True)
}


def options_of(kind: Kind, sinks: Tensor | None) -> dict[str, Any]:
    window, causal = kind.window_size, bool(kind.causal)
    return {"is_causal": causal, "window_size": window, "scale": kind.scale, "softcap": kind.softcap, "sinks": sinks}


def batch() -> tuple[list[Tensor], Tensor]:
    """q, k, v ``[B, H, T, D]`` to differentiate, and the gradient of the output."""
    *parts, grad = (t.unflatten(0, (3, 13)).transpose(1, 2) for t in make_inputs(ROWS))
    return [part.clone().requires_grad_() for part in parts], grad


@pytest.mark.parametrize("name", ["causal", "bidirectional", "scale"])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_a_plain_kind_is_torchs_own_function(name: str, kv_heads: int) -> None:
    (q, k, v), grad = batch()
    leaves = [q, *(t.detach().repeat_interleave(kv_heads // 2, 1).requires_grad_() for t in (k, v))]
    kind = KINDS[name]
    expected = F.scaled_dot_product_attention(*leaves, is_causal=bool(kind.causal), scale=kind.scale, enable_gqa=True)
    own = attention(*leaves, is_causal=bool(kind.causal), scale=kind.scale)
    assert own.shape == expected.shape == (3, 4, 13, 5)
    torch.testing.assert_close(own, expected, rtol=0, atol=1e-12)
    for one, other in zip(
        torch.autograd.grad(own, leaves, grad), torch.autograd.grad(expected, leaves, grad), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", SERVED)
def test_other_kinds_are_attention_with_a_mask(name: str) -> None:
    kind, (leaves, grad) = SERVED[name], batch()
    sinks = make_sinks(ROWS).requires_grad_() if kind.sinks else None
    own = attention(*leaves, **options_of(kind, sinks))
    rows = [[t[i].transpose(0, 1) for t in leaves] for i in range(3)]
    expected = torch.stack([plain_attention(*row, kind, bool(kind.causal), sinks).transpose(0, 1) for row in rows])
    torch.testing.assert_close(own, expected, rtol=0, atol=1e-12)
    wanted = leaves if sinks is None else [*leaves, sinks]
    for one, other in zip(
        torch.autograd.grad(own, wanted, grad), torch.autograd.grad(expected, wanted, grad), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-11)


def test_defaults_are_causal_text() -> None:
    (q, k, v), _ = batch()
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(attention(q, k, v), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_acts_as_on_torchs_own_function(dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(2, 2, 9, 8, dtype=dtype) for _ in range(3))
    with torch.autocast("cpu", torch.bfloat16):
        own, expected = attention(q, k, v), F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert own.dtype == expected.dtype == torch.bfloat16
    rounded = (t.bfloat16().float() for t in (q, k, v))  # torch computes in bfloat16, we in float32
    exact = F.scaled_dot_product_attention(*rounded, is_causal=True)
    torch.testing.assert_close(own, exact.bfloat16(), rtol=2**-7, atol=0)


def _inside_a_region() -> list[tuple[dict[str, Any], int]]:
    context = own_context(join_world(), ROWS.lengths, 2)
    results = []
    for scheme in SCHEMES:
        for kind in SERVED.values():
            *parts, grad = (t[context.pack_index] for t in make_inputs(ROWS))
            leaves = [part.requires_grad_() for part in parts]
            sinks = make_sinks(ROWS).requires_grad_() if kind.sinks else None
            with ContextParallelAttention(context, AttentionOptions(scheme)) as mode:
                out = attention(*(t.transpose(0, 1).unsqueeze(0) for t in leaves), **options_of(kind, sinks))
            out = out[0].transpose(0, 1)
            wanted = leaves if sinks is None else [*leaves, sinks]
            results.append((share_of(context, out, torch.autograd.grad(out, wanted, grad)), mode.calls))
    return results


def test_inside_a_region_the_result_is_that_of_the_whole_batch(ranks: RankPool) -> None:
    by_rank = ranks.run(_inside_a_region, 2)
    cases = [(scheme, name) for scheme in SCHEMES for name in SERVED]
    for (scheme, name), results in zip(cases, zip(*by_rank, strict=True), strict=True):
        assert [calls for _, calls in results] == [1, 1]
        got = join_shares(ROWS, [share for share, _ in results]).arrays
        kind, (leaves, grad) = SERVED[name], batch()
        sinks = make_sinks(ROWS).requires_grad_() if kind.sinks else None
        out = attention(*leaves, **options_of(kind, sinks))
        wanted = leaves if sinks is None else [*leaves, sinks]
        grads = torch.autograd.grad(out, wanted, grad)
        for array, whole in zip(got.values(), (out, *grads[:3]), strict=False):
            for row, where in enumerate(sample_slices(ROWS.lengths)):
                expected = whole[row].transpose(0, 1).detach().numpy()
                np.testing.assert_allclose(array[where], expected, rtol=0, atol=1e-11, err_msg=f"{scheme} {name}")
        if sinks is not None:
            np.testing.assert_allclose(got["dsinks"], grads[3].numpy(), rtol=0, atol=1e-11)


@pytest.mark.parametrize("flag", [True, 1, np.bool_(True), torch.tensor(True), [True] * 3, torch.ones(3).bool()])
@pytest.mark.parametrize("window", [None, (-1, -1), [np.int64(20), 0]])
def test_whatever_stands_for_true_and_for_no_window(flag: Any, window: Any) -> None:
    leaves, _ = batch()
    assert torch.equal(attention(*leaves, is_causal=flag, window_size=window), attention(*leaves))


@pytest.mark.parametrize("window", [(2.5, 0), 3, (1,), "ab"])
def test_a_window_that_is_no_pair_of_whole_numbers_is_refused(window: Any) -> None:
    leaves, _ = batch()
    with pytest.raises(UnsupportedAttentionError, match="is not a pair") as caught:
        attention(*leaves, window_size=window)
    assert str(caught.value).endswith("Change the call.")


def test_whole_numbers_and_cross_attention_are_refused() -> None:
    (q, k, v), _ = batch()
    with pytest.raises(UnsupportedAttentionError, match="of one dtype of float64, float32"):
        attention(*(t.detach().long() for t in (q, k, v)))
    with pytest.raises(UnsupportedAttentionError, match="the key has 5 tokens, the query 13"):
        attention(q, k[:, :, :5], v[:, :, :5])


@pytest.mark.parametrize("scale", [0.0, -1.0, -0.3])
@pytest.mark.parametrize("window", [None, (3, 0)])
def test_scales_that_flash_kernels_cannot_take(scale: float, window: Any) -> None:
    leaves, grad = batch()
    own = attention(*leaves, scale=scale, window_size=window)
    mask = torch.ones(13, 13).tril().bool() if window is None else torch.ones(13, 13).tril().triu(-3).bool()
    q, k, v = (t.repeat_interleave(4 // t.shape[1], 1) for t in leaves)
    expected = ((scale * q @ k.mT).masked_fill(~mask, -torch.inf)).softmax(-1) @ v
    torch.testing.assert_close(own, expected, rtol=0, atol=1e-12)
    for one, other in zip(
        torch.autograd.grad(own, leaves, grad), torch.autograd.grad(expected, leaves, grad), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("window", [(sys.maxsize, sys.maxsize), (2**70, 0)])
@pytest.mark.parametrize("causal", [True, False])
def test_a_window_wider_than_any_sample_is_no_window(window: tuple[int, int], causal: bool) -> None:
    leaves, _ = batch()
    right = window[1] if causal else sys.maxsize
    assert torch.equal(
        attention(*leaves, is_causal=causal, window_size=(window[0], right)), attention(*leaves, is_causal=causal)
    )


REFUSED = {
    "scale is a tensor": {"scale": torch.tensor(0.5, requires_grad=True)},
    "softcap is a tensor": {"softcap": torch.tensor(2.0)},
    "scale='a' is not a number": {"scale": "a"},
    "softcap=1e\\+39": {"softcap": 1e39},
    "sinks are list": {"sinks": [1.0, 2.0]},
    "dropout_p=0.1 ": {"dropout_p": 0.1},
    "is_causal=None": {"is_causal": None},
}


@pytest.mark.parametrize("words", REFUSED)
def test_values_of_other_types_are_refused_by_name(words: str) -> None:
    leaves, _ = batch()
    with pytest.raises(UnsupportedAttentionError, match=words):
        attention(*leaves, **REFUSED[words])
