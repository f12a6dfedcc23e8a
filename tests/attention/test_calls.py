"""How often kernels are called: once for many samples and chunks."""

from __future__ import annotations

import random
from typing import Any

import pytest

from lightning_dcp.attention import context_parallel_attention
from lightning_dcp.parallel.context import CPContext
from lightning_dcp.parallel.exchange import Exchange
from tests.attention.dense import KINDS, Inputs, Kind
from tests.attention.support import SCHEMES, Case, assert_as_dense, join_shares, local_leaves, played_contexts, share_of
from tests.attention.varlen import PlainVarlenKernel

SHORT = tuple(random.Random(0).randint(8, 40) for _ in range(200))


def calls_of(case: Case) -> list[dict[str, int]]:
    """The calls of each rank, which together computed what is right."""
    played, context = played_contexts(case)
    kernels = [PlainVarlenKernel() for _ in range(case.size)]

    def job(exchange: Exchange) -> dict[str, Any]:
        own: CPContext = context(exchange)
        leaves, grad = local_leaves(case.inputs, own)
        kind = case.kind.attention_kind(case.inputs)
        out = context_parallel_attention(*leaves, own, kind, scheme=case.scheme, kernel=kernels[own.rank])
        out.backward(grad)
        return share_of(own, out, [t.grad for t in leaves])

    assert_as_dense(case, join_shares(case.inputs, played.run(job)))
    return [kernel.calls for kernel in kernels]


@pytest.mark.parametrize("kind", [KINDS["causal"], KINDS["bidirectional"]], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_two_hundred_short_samples_on_one_rank_are_one_call(scheme: str, kind: Kind) -> None:
    assert calls_of(Case(Inputs(SHORT), 1, scheme=scheme, kind=kind)) == [{"forward": 1, "backward": 1}]


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_all_chunks_of_a_hop_are_one_call(layout: str) -> None:
    size = 4
    for rank, calls in enumerate(calls_of(Case(Inputs(SHORT), size, layout))):
        # a rank's own chunks are one triangle a sample; contiguous chunks see nothing of those of later ranks
        hops = size if layout == "zigzag" else rank + 1
        assert calls == {"forward": hops, "backward": hops}


@pytest.mark.parametrize("lengths", [(1, 2, 3, 4, 5, 6, 7) * 20, (3, 1, 1, 2) * 10], ids=["up to 7", "up to 3"])
def test_samples_of_a_few_tokens_make_no_further_calls(lengths: tuple[int, ...]) -> None:
    for calls in calls_of(Case(Inputs(lengths), 4)):
        assert calls["forward"] == calls["backward"] <= 4


def test_all_heads_of_a_rank_are_one_call_and_so_are_all_gathered_keys() -> None:
    assert calls_of(Case(Inputs(SHORT, 4), 4, scheme="ulysses")) == [{"forward": 1, "backward": 1}] * 4
    for calls in calls_of(Case(Inputs(SHORT), 4, scheme="all_gather")):
        assert calls["forward"] == calls["backward"] <= 2  # triangles, and what lies before them
