"""Memory of attention: nothing as large as T x T, and a rank's share falls with the size of its group."""

from __future__ import annotations

import pytest
import torch

from lightning_dcp.attention.kernels import KERNELS as OWN_KERNELS
from lightning_dcp.attention.schemes import SCHEMES as OWN_SCHEMES
from lightning_dcp.attention.schemes import AttentionCall
from lightning_dcp.attention.shape import AttentionShape, Scores
from lightning_dcp.parallel.blocks import AttentionMask
from lightning_dcp.parallel.context import CPContext
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


Call = tuple[int, int, int, torch.dtype]
"""Tokens of the one sample, query heads, key heads, dtype."""
LONG_SAMPLE: Call = (32768, 1, 1, torch.float32)
CALLS: list[Call] = [(2048, 4, kv_heads, dtype) for kv_heads in (4, 1) for dtype in (torch.float32, torch.bfloat16)]


def _peaks(size: int, calls: list[tuple[str, Call]]) -> list[int]:
    groups = join_world()
    return [_peak(own_context(groups, call[:1], size), scheme, *call[1:]) for scheme, call in calls]


def _peak(context: CPContext, scheme: str, heads: int, kv_heads: int, dtype: torch.dtype) -> int:
    """The most bytes of tensors on this rank in one attention call, with its inputs and the gradient of its output."""
    share = context.num_local_tokens
    with TensorWatch() as watch, torch.no_grad():
        q, grad = (torch.randn(share, heads, HEAD_DIM, dtype=dtype) for _ in range(2))
        k, v = (torch.randn(share, kv_heads, HEAD_DIM, dtype=dtype) for _ in range(2))
        shape, scores = AttentionShape.of(q, k, v), Scores(HEAD_DIM**-0.5)
        call = AttentionCall(context, shape, AttentionMask(), scores, OWN_KERNELS["cpu_flash"])
        _, saved = OWN_SCHEMES[scheme].forward(call, q, k, v, None)
        OWN_SCHEMES[scheme].backward(call, grad, saved, None)
    return watch.peak


@pytest.fixture(scope="module")
def shares(ranks: RankPool) -> dict[tuple[str, Call], float]:
    """The largest peak of four ranks over that of one, by scheme and call."""
    calls = [("ring", LONG_SAMPLE), *((scheme, call) for scheme in SCHEMES for call in CALLS)]
    alone = dict(
        zip(
            [LONG_SAMPLE, *CALLS], ranks.run(_peaks, 1, 1, [("ring", c) for c in [LONG_SAMPLE, *CALLS]])[0], strict=True
        )
    )
    together = [max(peaks) for peaks in zip(*ranks.run(_peaks, 4, 4, calls), strict=True)]
    return {(scheme, call): peak / alone[call] for (scheme, call), peak in zip(calls, together, strict=True)}


@pytest.mark.parametrize("call", [LONG_SAMPLE, *CALLS], ids=str)
def test_the_peak_of_a_ring_falls_below_two_fifths_on_four_ranks(
    shares: dict[tuple[str, Call], float], call: Call
) -> None:
    assert shares["ring", call] < 0.4


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_the_other_schemes_need_more_at_a_time_than_a_ring(shares: dict[tuple[str, Call], float], call: Call) -> None:
    assert shares["ring", call] < min(shares["all_gather", call], shares["ulysses", call])


def test_what_is_small_in_the_other_schemes(shares: dict[tuple[str, Call], float]) -> None:
    # gloo's threads let go of what was sent a moment after a collective is over: these peaks vary a little
    many, grouped = CALLS[0], CALLS[2]
    assert shares["ulysses", many] < 0.8  # every rank has all tokens, but only of its own heads
    assert shares["all_gather", grouped] < 0.75  # every rank has all keys, which are few beside the queries
