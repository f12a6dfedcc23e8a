"""Memory of attention: nothing as large as T x T, and a rank's share falls with the size of its group."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch

from lightning_dcp.attention.kernels import KERNELS as OWN_KERNELS
from lightning_dcp.attention.schemes import SCHEMES as OWN_SCHEMES
from lightning_dcp.attention.schemes import AttentionCall
from lightning_dcp.attention.shape import AttentionShape, Scores
from lightning_dcp.parallel.blocks import AttentionMask
from lightning_dcp.parallel.exchange import Exchange
from tests.attention.dense import KINDS, Inputs, plain_attention
from tests.attention.support import SCHEMES, Case, attend, played_contexts
from tests.attention.tracking import TensorWatch
from tests.parallel.support import join_world, own_context
from tests.support.ranks import RankPool

HEAD_DIM = 32
LONG = 3072  # its square is more than a tile of the reference kernel over all heads


def watched(case: Case) -> list[TensorWatch]:
    """What each rank of a played group makes, forward and backward."""
    played, context = played_contexts(case)

    def job(exchange: Exchange) -> TensorWatch:
        own = context(exchange)
        with TensorWatch() as watch:
            attend(case, own)
        return watch

    return played.run(job)


@pytest.mark.parametrize("kernel", ["cpu_flash", "reference"])
@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_no_tensor_of_causal_text_has_t_times_t_elements(scheme: str, size: int, kernel: str) -> None:
    inputs = Inputs((LONG,), 1, heads=2, head_dim=8, v_head_dim=8, dtype=torch.float32)
    for watch in watched(Case(inputs, size, kernel=kernel, scheme=scheme)):
        assert watch.largest < LONG**2 / 2
        if kernel == "cpu_flash":  # nothing but tokens, and at most queries, keys and values side by side
            assert watch.largest <= LONG * 2 * 3 * 8


@pytest.mark.parametrize("kind", ["small window", "sinks", "scale", "window on both sides", "bidirectional"])
def test_other_kinds_need_no_mask_either(kind: str) -> None:
    inputs = Inputs((LONG,), 1, heads=2, head_dim=8, v_head_dim=8, dtype=torch.float32)
    if "window" in kind:  # the blocks of a narrow window are many
        inputs = Inputs((LONG // 6,), 1, heads=2, head_dim=8, v_head_dim=8, dtype=torch.float32)
    for watch in watched(Case(inputs, 2, kind=KINDS[kind])):
        assert watch.largest < sum(inputs.lengths) ** 2 / 2


def test_the_watch_sees_forward_and_backward_of_attention_by_hand() -> None:
    q = torch.randn(256, 1, 4, requires_grad=True)
    with TensorWatch() as forward:
        out = plain_attention(q, q, q)
    with TensorWatch() as backward:
        out.sum().backward()
    assert forward.largest == backward.largest == 256**2
    assert forward.peak > 2 * 4 * 256**2  # scores, weights and more
    assert forward.live < forward.peak


# --- how much lives at one time


def _peaks(scheme: str, size: int, tokens: int, heads: int, kv_heads: int, dtype: torch.dtype) -> int:
    """The most bytes of tensors on this rank in one attention call, with its inputs and the gradient of its output."""
    context = own_context(join_world(), (tokens,), size)
    share = context.num_local_tokens
    with TensorWatch() as watch, torch.no_grad():
        q, grad = (torch.randn(share, heads, HEAD_DIM, dtype=dtype) for _ in range(2))
        k, v = (torch.randn(share, kv_heads, HEAD_DIM, dtype=dtype) for _ in range(2))
        shape, scores = AttentionShape.of(q, k, v), Scores(HEAD_DIM**-0.5)
        call = AttentionCall(context, shape, AttentionMask(), scores, OWN_KERNELS["cpu_flash"])
        _, saved = OWN_SCHEMES[scheme].forward(call, q, k, v, None)
        OWN_SCHEMES[scheme].backward(call, grad, saved, None)
    return watch.peak


@lru_cache(maxsize=8)
def alone(ranks: RankPool, *call: int | torch.dtype) -> int:
    return int(ranks.run(_peaks, 1, "ring", 1, *call)[0])


def share_of_peak(ranks: RankPool, scheme: str, *call: int | torch.dtype) -> float:
    """The largest peak of four ranks over that of one."""
    return max(ranks.run(_peaks, 4, scheme, 4, *call)) / alone(ranks, *call)


def test_the_peak_of_a_long_sample_falls_with_the_group(ranks: RankPool) -> None:
    assert share_of_peak(ranks, "ring", 32768, 1, 1, torch.float32) < 0.4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kv_heads", [4, 1])
def test_the_peak_of_a_ring_falls_below_two_fifths_on_four_ranks(
    ranks: RankPool, kv_heads: int, dtype: torch.dtype
) -> None:
    assert share_of_peak(ranks, "ring", 4096, 4, kv_heads, dtype) < 0.4


@pytest.mark.parametrize("kv_heads", [4, 1])
def test_the_other_schemes_need_more_at_a_time_than_a_ring(ranks: RankPool, kv_heads: int) -> None:
    call = 4096, 4, kv_heads, torch.float32
    shares = {scheme: share_of_peak(ranks, scheme, *call) for scheme in SCHEMES}
    assert shares["ring"] < shares["all_gather"]
    assert shares["ring"] < shares["ulysses"] < 1
    if kv_heads == 1:  # what is gathered is small beside the queries
        assert shares["all_gather"] < 0.6
    else:  # every rank has all keys, but only its own heads
        assert shares["ulysses"] < 0.65
