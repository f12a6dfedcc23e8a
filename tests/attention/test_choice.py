"""Which exchange scheme is chosen, and why."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from lightning_dcp.attention.choice import _QUERIES, Estimate, SchemeChooser, _pairs, _some
from lightning_dcp.attention.shape import AttentionShape
from lightning_dcp.parallel.blocks import AttentionMask
from lightning_dcp.parallel.context import CPContext, make_context
from lightning_dcp.parallel.groups import CPGroup
from lightning_dcp.parallel.links import Link
from lightning_dcp.schedule import CostModel

MANY_HEADS = AttentionShape(32, 8, 128, 128, torch.bfloat16, "cuda")
CAUSAL = AttentionMask()
FREE = CostModel(linear=1e-7, attention=1e-12)
FAST, SLOW = Link(1e-6, 1e12), Link(1e-3, 1e8)


def pack(lengths: tuple[int, ...], size: int, layout: str = "zigzag", rank: int = 0) -> CPContext:
    return make_context(CPGroup(None, tuple(range(size))), rank, lengths, layout=layout)


def chosen(cost: CostModel, link: Link, context: CPContext, shape: AttentionShape = MANY_HEADS) -> str:
    return SchemeChooser(cost, {context.size: link})(shape, CAUSAL, context)


def test_alone_there_is_nothing_to_choose() -> None:
    chooser = SchemeChooser(FREE, {})
    assert chooser(MANY_HEADS, CAUSAL, pack((100,), 1)) == "ring"
    assert not chooser.picked


def test_work_that_hides_its_transfers_goes_by_the_ring() -> None:
    hidden = CostModel(linear=1e-7, attention=1e-12, overlap=1.0)
    assert chosen(hidden, FAST, pack((100_000,), 4)) == "ring"


def test_short_samples_on_a_kernel_that_is_slow_on_short_shards_go_by_heads() -> None:
    cost = CostModel(linear=1e-7, attention=1e-11, efficiency=((64, 0.1), (4096, 1.0)))
    assert chosen(cost, FAST, pack((1024,) * 8, 8)) == "ulysses"


def test_with_fewer_heads_than_ranks_splitting_heads_leaves_ranks_idle() -> None:
    cost = CostModel(linear=1e-7, attention=1e-9, efficiency=((64, 0.5), (4096, 1.0)))
    few = AttentionShape(2, 2, 128, 128, torch.bfloat16, "cuda")
    estimate = SchemeChooser(cost, {8: FAST}).estimate(few, CAUSAL, pack((1024,) * 8, 8))
    assert estimate.seconds["ulysses"] > 2 * estimate.seconds["ring"]


def test_slow_links_favour_what_sends_the_least() -> None:
    # By the ring each token's keys and values go to 7 ranks; by heads its queries, keys and values go to one.
    assert chosen(FREE, SLOW, pack((8192,), 8)) == "ulysses"


def test_contiguous_chunks_keep_a_ring_waiting_for_its_last_rank() -> None:
    cost = CostModel(linear=0.0, attention=1e-9, overlap=1.0)
    even, uneven = (
        SchemeChooser(cost, {4: FAST}).estimate(MANY_HEADS, CAUSAL, pack((8192,), 4, layout)).seconds
        for layout in ("zigzag", "contiguous")
    )
    assert uneven["ring"] == pytest.approx(1.75 * even["ring"], rel=0.02)  # (2c - 1) / c
    assert uneven["all_gather"] == pytest.approx(1.75 * even["all_gather"], rel=0.02)
    assert uneven["ulysses"] == pytest.approx(even["ulysses"], rel=0.02)


@pytest.mark.parametrize(
    ("mask", "factor"),
    [(AttentionMask(causal=False), 2.0), (AttentionMask(window_size=(1023, 0)), 2 * 1024 / 8192 * (1 - 512 / 8192))],
)
def test_work_counts_by_the_pairs_that_a_mask_leaves(mask: AttentionMask, factor: float) -> None:
    cost = CostModel(linear=0.0, attention=1e-6, overlap=1.0)
    chooser, context = SchemeChooser(cost, {4: FAST}), pack((8192,), 4)
    causal, other = (chooser.estimate(MANY_HEADS, m, context).seconds["ulysses"] for m in (CAUSAL, mask))
    assert other == pytest.approx(factor * causal, rel=0.01)


def test_estimates_without_transfers_are_the_cost_models_attention() -> None:
    cost = CostModel(linear=0.0, attention=1e-9, efficiency=((1000, 0.5), (4000, 1.0)))
    estimate = SchemeChooser(cost, {4: Link(0.0, math.inf)}).estimate(MANY_HEADS, CAUSAL, pack((4000,), 4))
    assert estimate.seconds["ring"] == pytest.approx(cost.attention_seconds([4000], 4)[0], rel=0.01)
    assert estimate.seconds["ulysses"] == pytest.approx(cost.attention_seconds([4000], 1)[0] / 4)


def test_one_call_is_one_of_those_that_the_cost_model_stands_for() -> None:
    carried = MANY_HEADS.forward_bytes + MANY_HEADS.backward_bytes
    one = CostModel(linear=0.0, attention=1e-9, hop_bytes=carried, bandwidth=1e12, hop_latency=2e-6)
    all_layers = CostModel(linear=0.0, attention=24e-9, hop_bytes=24 * carried, bandwidth=1e12, hop_latency=48e-6)
    context = pack((4096, 500), 4)
    first, second = (SchemeChooser(cost).estimate(MANY_HEADS, CAUSAL, context).seconds for cost in (one, all_layers))
    assert first == pytest.approx(second)


def test_without_measured_links_those_of_the_cost_model_count_also_across_nodes() -> None:
    carried = MANY_HEADS.forward_bytes + MANY_HEADS.backward_bytes
    cost = CostModel(
        linear=0.0, attention=1e-15, hop_bytes=carried, bandwidth=1e12, internode_bandwidth=1e9, ranks_per_node=4
    )
    inside, across = (
        SchemeChooser(cost).estimate(MANY_HEADS, CAUSAL, pack((size * 1024,), size)).seconds["all_gather"]
        for size in (4, 8)
    )
    assert inside == pytest.approx(3 * 1024 * carried / 1e12, rel=0.1)
    assert across == pytest.approx(7 * 1024 * carried / 1e9, rel=0.1)


def test_the_ring_is_kept_unless_another_is_clearly_better() -> None:
    near = {"ring": 1.0, "all_gather": 0.99, "ulysses": 0.97}
    assert Estimate(near).scheme == "ring"
    assert Estimate({**near, "ulysses": 0.9}).scheme == "ulysses"
    assert Estimate({**near, "all_gather": 0.5}).scheme == "all_gather"


@pytest.mark.parametrize(("lengths", "size"), [((32,) * 2048, 4), ((48,) * 1300, 6), ((80,) * 3000, 8)])
def test_equal_short_samples_give_every_rank_the_same_work(lengths: tuple[int, ...], size: int) -> None:
    _, pairs = _pairs(CAUSAL, pack(lengths, size))
    assert pairs.sum(1) == pytest.approx(1 / size, rel=0.05)


@pytest.mark.parametrize("tokens", [1, 2, _QUERIES - 1, _QUERIES, _QUERIES + 1, 3 * _QUERIES + 5])
def test_the_queries_that_are_looked_at_are_of_the_pack_and_spread_over_it(tokens: int) -> None:
    queries = _some(tokens)
    assert len(queries) <= _QUERIES
    assert queries[0] >= 0 and queries[-1] < tokens
    assert (np.diff(queries) > 0).all() and np.diff(queries, append=tokens).max() <= 2 * -(
        -tokens // _QUERIES
    ) + tokens % 4


def test_all_ranks_of_a_group_choose_alike() -> None:
    for lengths in ((13, 700, 64), (1,), (5000, 3)):
        for link in (FAST, SLOW):
            names = {
                SchemeChooser(FREE, {4: link})(MANY_HEADS, CAUSAL, pack(lengths, 4, rank=rank)) for rank in range(4)
            }
            assert len(names) == 1


def test_what_was_picked_is_counted_and_said_once_for_each_kind_of_call() -> None:
    messages: list[str] = []
    chooser = SchemeChooser(FREE, {8: SLOW, 2: SLOW}, messages.append)
    first = pack((8192,), 8)
    for context in (first, first, pack((8192,), 8), pack((8192,), 2), pack((8192,), 8, rank=1)):
        chooser(MANY_HEADS, CAUSAL, context)
    assert chooser.picked == {(8, "ulysses"): 4, (2, "ring"): 1}  # at two ranks the ring sends less
    assert len(messages) == 2
    assert (
        "32 query and 8 key heads on 8 ranks, for example 8192 tokens in 1 sample(s): ulysses (estimated: ring "
        in messages[0]
    )


def test_a_context_that_is_gone_is_forgotten() -> None:
    chooser = SchemeChooser(FREE, {2: FAST})
    chooser(MANY_HEADS, CAUSAL, pack((64,), 2))
    assert not len(chooser._known)


def test_a_size_that_was_not_measured_is_estimated_by_the_cost_model() -> None:
    context = pack((8192,), 4)
    unmeasured = SchemeChooser(FREE, {2: SLOW}).estimate(MANY_HEADS, CAUSAL, context)
    assert unmeasured == SchemeChooser(FREE).estimate(MANY_HEADS, CAUSAL, context)
