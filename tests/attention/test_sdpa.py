"""torch's attention function over a CP group, and what is refused instead of computed wrongly."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_dcp.attention import context_parallel_attention
from lightning_dcp.attention.options import AttentionOptions
from lightning_dcp.attention.sdpa import ContextParallelAttention
from lightning_dcp.errors import UnsupportedAttentionError
from lightning_dcp.parallel.context import CPContext, make_context
from lightning_dcp.parallel.groups import CPGroup
from tests.attention.dense import Inputs, Kind, make_inputs
from tests.attention.support import SCHEMES, Case, assert_as_dense, join_shares, share_of
from tests.parallel.support import join_world, own_context
from tests.support.ranks import RankPool

LENGTHS = (5, 3)


@pytest.fixture
def context() -> CPContext:
    """A pack of two samples on a group of one rank."""
    return make_context(CPGroup(None, (0,)), 0, LENGTHS)


def heads_first(tokens: int = 8, heads: int = 2, size: int = 4, batch: int = 1, **options: Any) -> Tensor:
    return torch.randn(batch, heads, tokens, size, **options)


# --- the same result


def _call_torchs_function(calls: list[tuple[str, Inputs, Kind]]) -> list[tuple[dict[str, Any], int]]:
    groups, results = join_world(), []
    for scheme, inputs, kind in calls:
        context = own_context(groups, inputs.lengths, 2)
        q, k, v, grad = (t[context.pack_index].transpose(0, 1).unsqueeze(0) for t in make_inputs(inputs))
        leaves = [t.requires_grad_() for t in (q, k, v)]
        options = {"is_causal": bool(kind.causal), "scale": kind.scale, "enable_gqa": inputs.kv_heads != 4}
        with ContextParallelAttention(context, AttentionOptions(scheme)) as mode:
            out = F.scaled_dot_product_attention(*leaves, **options)
        out.backward(grad)
        tokens_first = [t[0].transpose(0, 1) for t in (out, *(t.grad for t in leaves))]
        results.append((share_of(context, tokens_first[0], tokens_first[1:]), mode.calls))
    return results


def test_torchs_function_runs_over_the_group(ranks: RankPool) -> None:
    ways = product(SCHEMES, ((4, None), (2, None), (1, 0.7)), (True, False))
    calls = [(scheme, Inputs((13, 7, 64), heads), Kind(causal, scale=scale)) for scheme, (heads, scale), causal in ways]
    by_rank = ranks.run(_call_torchs_function, 2, calls)
    for (scheme, inputs, kind), results in zip(calls, zip(*by_rank, strict=True), strict=True):
        case = Case(inputs, 2, scheme=scheme, kind=kind)
        assert_as_dense(case, join_shares(inputs, [share for share, _ in results]))
        assert [served for _, served in results] == [1, 1]


def test_other_functions_and_calls_outside_pass_through(context: CPContext) -> None:
    q = heads_first()
    with ContextParallelAttention(context) as mode:
        assert torch.equal(F.relu(q), q.clamp(min=0))
    assert mode.calls == 0
    whole = F.scaled_dot_product_attention(q, q, q)
    assert whole.shape == q.shape


def test_modes_nest_and_the_inner_context_counts(context: CPContext) -> None:
    q = heads_first()
    inner = make_context(CPGroup(None, (0,)), 0, [8])
    with ContextParallelAttention(context) as outside, ContextParallelAttention(inner) as inside:
        out = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, q, q, is_causal=True))
    assert (outside.calls, inside.calls) == (0, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("autocast", [True, False])
def test_the_output_has_the_dtype_of_torchs_own_function(
    context: CPContext, dtype: torch.dtype, autocast: bool
) -> None:
    q, k, v = (heads_first(dtype=dtype) for _ in range(3))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        with ContextParallelAttention(context):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert out.dtype == expected.dtype
    assert out.shape == expected.shape
    first = slice(0, LENGTHS[0])  # the first sample sees the same keys either way
    if out.dtype is torch.bfloat16:  # torch computes in it, we in float32
        exact = F.scaled_dot_product_attention(*(t.bfloat16().float() for t in (q, k, v)), is_causal=True)
        torch.testing.assert_close(out[:, :, first], exact[:, :, first].bfloat16(), rtol=2**-7, atol=0)
    else:
        torch.testing.assert_close(out[:, :, first], expected[:, :, first])


# --- refused


REFUSED = {
    "attn_mask": {"attn_mask": torch.ones(8, 8, dtype=torch.bool)},
    "dropout_p=0.1": {"dropout_p": 0.1},
}


@pytest.mark.parametrize("problem", REFUSED)
def test_a_call_that_cannot_be_exact_is_refused(context: CPContext, problem: str) -> None:
    q = heads_first()
    with ContextParallelAttention(context), pytest.raises(UnsupportedAttentionError, match=problem) as caught:
        F.scaled_dot_product_attention(q, q, q, **{"is_causal": True, **REFUSED[problem]})
    for other in REFUSED.keys() - {problem}:
        assert f"{other} is" not in str(caught.value).split(". Call it with")[0]


@pytest.mark.parametrize("shape", [(2, 2, 8, 4), (2, 8, 4), (8, 4)])
def test_a_query_that_is_no_pack_is_refused(context: CPContext, shape: tuple[int, ...]) -> None:
    q = torch.randn(shape)
    message = rf"the query has shape \({', '.join(map(str, shape))}\)"
    with ContextParallelAttention(context), pytest.raises(UnsupportedAttentionError, match=message):
        F.scaled_dot_product_attention(q, q, q, is_causal=True)


@pytest.mark.parametrize("odd_one", [1, 2])
@pytest.mark.parametrize("shape", [(2, 2, 8, 4), (2, 8, 4)])
def test_keys_or_values_that_are_no_pack_are_refused(context: CPContext, odd_one: int, shape: tuple[int, ...]) -> None:
    tensors = [heads_first(), heads_first(), heads_first()]
    tensors[odd_one] = torch.randn(shape)
    with ContextParallelAttention(context), pytest.raises(UnsupportedAttentionError, match="has shape"):
        F.scaled_dot_product_attention(*tensors, is_causal=True)


def test_fewer_key_heads_without_grouping_are_refused(context: CPContext) -> None:
    q, k = heads_first(heads=4), heads_first(heads=2)
    with ContextParallelAttention(context), pytest.raises(UnsupportedAttentionError, match="without enable_gqa=True"):
        F.scaled_dot_product_attention(q, k, k, is_causal=True)


def test_torchs_multi_head_function_which_would_hide_its_attention_is_refused(context: CPContext) -> None:
    layer = torch.nn.MultiheadAttention(4, 2, batch_first=True)
    x = torch.randn(1, 8, 4)
    mask = torch.ones(8, 8, dtype=torch.bool).triu(1)
    with ContextParallelAttention(context), pytest.raises(UnsupportedAttentionError, match="multi_head_attention"):
        layer(x, x, x, attn_mask=mask, is_causal=True)


class Recurrence(torch.nn.Module):
    """A fake recurrent layer: each token's state is a decaying sum of those before it."""

    def forward(self, x: Tensor) -> Tensor:
        decay = torch.arange(x.shape[1], dtype=x.dtype)[:, None].exp()
        return torch.cumsum(x * decay, dim=1) / decay


MIXING = {
    "cumsum": Recurrence(),
    "conv1d": torch.nn.Conv1d(8, 8, 3, padding=1),
    "roll": lambda x: x.roll(1, 1),
    "softmax": lambda x: ((x @ x.mT).unsqueeze(1).softmax(-1) @ x.unsqueeze(1)).squeeze(1),
}


@pytest.mark.parametrize("name", MIXING)
def test_other_ways_to_mix_tokens_are_refused(context: CPContext, name: str) -> None:
    x = torch.randn(1, 8, 8)
    assert MIXING[name](x).shape == x.shape
    with ContextParallelAttention(context), pytest.raises(UnsupportedAttentionError, match=f"{name} over tokens"):
        MIXING[name](x)


def test_all_problems_of_a_call_are_in_one_message(context: CPContext) -> None:
    q = heads_first(batch=2)
    with ContextParallelAttention(context), pytest.raises(UnsupportedAttentionError) as caught:
        F.scaled_dot_product_attention(q, q, q, torch.ones(8, 8, dtype=torch.bool), 0.5)
    for problem in ("attn_mask is given", "dropout_p=0.5", "the query has shape (2, 2, 8, 4)"):
        assert problem in str(caught.value)


def test_a_pack_on_one_rank_needs_no_process_group(context: CPContext) -> None:
    case = Case(Inputs(LENGTHS), 1)
    q, k, v, grad = (t.clone() for t in make_inputs(case.inputs))
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out = context_parallel_attention(*leaves, context)
    share = share_of(context, out, torch.autograd.grad(out, leaves, grad))
    assert_as_dense(case, join_shares(case.inputs, [share]))


def test_a_router_with_as_many_experts_as_there_are_tokens_is_no_attention(context: CPContext) -> None:
    scores = torch.randn(1, 8, 8)
    with ContextParallelAttention(context):
        assert torch.equal(scores.softmax(-1), torch.softmax(scores, -1))
        with pytest.raises(UnsupportedAttentionError, match="softmax over tokens"):
            torch.softmax(torch.randn(2, 8, 8), -1)
        with pytest.raises(UnsupportedAttentionError, match="softmax over tokens"):
            F.softmax(torch.randn(1, 1, 8, 8), -1)


PER_TOKEN = {
    "sum over features": lambda x: x.cumsum(-1),
    "features rolled": lambda x: torch.roll(x, 1, dims=-1),
    "sum over heads": lambda x: torch.cumsum(x.unflatten(-1, (2, 4)), dim=2),
    "convolution of width one": lambda x: F.conv1d(x.mT, torch.ones(8, 8, 1)),
}


@pytest.mark.parametrize("name", PER_TOKEN)
def test_what_stays_inside_a_token_is_let_through(context: CPContext, name: str) -> None:
    x = torch.randn(1, 8, 8)  # as many features as tokens, by chance
    with ContextParallelAttention(context):
        inside = PER_TOKEN[name](x)
    assert torch.equal(inside, PER_TOKEN[name](x))


ALONG_TOKENS = {
    "cumsum": lambda x: (x[..., 0] > 0).cumsum(-1),
    "roll": lambda x: x.roll(1),
    "cumprod": lambda x: x.cumprod(1),
    "logcumsumexp": lambda x: torch.logcumsumexp(x, dim=1),
    "log_softmax": lambda x: (x.unsqueeze(1) @ x.unsqueeze(1).mT).log_softmax(-1).exp() @ x.unsqueeze(1),
    "conv1d": lambda x: F.conv1d(input=x.mT, weight=torch.ones(8, 8, 3), padding=1),
}


@pytest.mark.parametrize("name", ALONG_TOKENS)
def test_what_goes_from_token_to_token_is_refused_however_it_is_called(context: CPContext, name: str) -> None:
    with ContextParallelAttention(context), pytest.raises(UnsupportedAttentionError, match=f"{name} over tokens"):
        ALONG_TOKENS[name](torch.randn(1, 8, 8))


def test_around_a_backward_only_a_regions_attention_is_served_and_nothing_refused(context: CPContext) -> None:
    """The rest of the user's step is in the backward too: losses of their own, layers beside the region."""
    x = torch.randn(1, 8, 8)
    with ContextParallelAttention(context, again=True) as mode:
        assert torch.equal(x.cumsum(1), torch.cumsum(x, 1))
        long = torch.randn(1, 2, 9, 4)
        assert F.scaled_dot_product_attention(long, long, long).shape == long.shape
        assert mode.calls == 0
        q = heads_first()
        F.scaled_dot_product_attention(q, q, q, is_causal=True)
        assert mode.calls == 1
