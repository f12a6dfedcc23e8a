"""Plans of the dynamic scheduler: their rules on every plane, the times they promise, small cases, options."""

import random

import numpy as np
import pytest
from hypothesis import given, settings

from lightning_dcp.errors import PlanError, SampleTooLongError
from lightning_dcp.schedule import CostModel, DynamicScheduler, lower_bound_s, preset, simulate
from tests.schedule.oracles import broken_rules, crossing, makespan, walk
from tests.schedule.plans import limited_sizes, lognormal_lengths, schedulers

quickly = settings(max_examples=60, deadline=None)
H100 = preset("h100")
PLANES = pytest.mark.parametrize("ranks", range(1, 65))
free_schedulers = schedulers(mode="free", microbatch_multiple=1)


# ------------------------------------------------------------------ rules


@PLANES
def test_plans_of_every_plane_keep_all_rules(ranks):
    generator = random.Random(ranks)
    for count in (1, 7, 60):
        scheduler = DynamicScheduler(ranks, 1000)
        longest = generator.choice([300, 1000, 1000 * ranks])
        lengths = [max(1, min(longest, int(generator.lognormvariate(5, 2)))) for _ in range(count)] + [longest]
        plan = scheduler.schedule(lengths)
        plan.validate()
        assert broken_rules(scheduler, lengths, plan) == []
        assert walk(plan) == {}


@given(free_schedulers)
@quickly
def test_plans_keep_all_rules_with_any_options(case):
    scheduler, lengths = case
    plan = scheduler.schedule(lengths)
    plan.validate()
    assert broken_rules(scheduler, lengths, plan) == []
    assert walk(plan) == {}


@pytest.mark.slow
@given(schedulers(most=300))
@settings(max_examples=1500, deadline=None)
def test_plans_of_larger_batches_keep_all_rules_in_both_modes(case):
    scheduler, lengths = case
    try:
        plan = scheduler.schedule(lengths)
    except PlanError:
        assert scheduler.mode == "lockstep"
        return
    plan.validate()
    assert broken_rules(scheduler, lengths, plan) == []
    assert walk(plan) == {}


@given(free_schedulers)
@quickly
def test_the_plan_says_what_it_was_made_for(case):
    scheduler, lengths = case
    plan = scheduler.schedule(lengths)
    assert CostModel.from_dict(plan.extra["cost_model"]) == scheduler.cost
    seconds = plan.extra["predicted_step_s"]
    assert seconds == pytest.approx(simulate(plan, scheduler.cost, scheduler.rank_speeds).step_s, rel=1e-9)
    assert seconds == pytest.approx(makespan(plan, scheduler.cost, scheduler.rank_speeds), rel=1e-9)
    assert plan.extra["lower_bound_s"] <= seconds * (1 + 1e-9)
    limits = scheduler.ranks, scheduler.max_seqlen_per_dp_cp_rank, scheduler.cost
    bound = lower_bound_s(lengths, *limits, sizes=scheduler.sizes, speeds=scheduler.rank_speeds)
    assert plan.extra["lower_bound_s"] == bound


@pytest.mark.parametrize("mode", ["free", "lockstep"])
def test_groups_that_cannot_but_cross_a_node_are_counted_as_such(mode):
    """Of the two groups of three ranks, one has ranks in both nodes of four."""
    limits = {"min_context_parallel_size": 3, "max_context_parallel_size": 3}
    scheduler = DynamicScheduler(6, 1000, mode=mode, ranks_per_node=4, **limits)
    plan = scheduler.schedule([2000, 2000])
    assert plan.extra["predicted_step_s"] == pytest.approx(makespan(plan, scheduler.cost), rel=1e-9)


@pytest.mark.slow
def test_a_million_samples_are_planned():
    lengths = np.clip(np.random.default_rng(0).lognormal(5.9, 1.3, 1_000_000), 1, 65536).astype(int).tolist()
    for mode in ("free", "lockstep"):
        scheduler = DynamicScheduler(64, 8192, mode=mode)
        plan = scheduler.schedule(lengths)
        assert broken_rules(scheduler, lengths, plan) == []
        assert plan.extra["predicted_step_s"] <= 1.02 * plan.extra["lower_bound_s"]


# ------------------------------------------------------------------ small cases


def test_one_document_that_needs_all_ranks_gets_them():
    assert [(p.first_rank, p.cp_size, p.samples) for p in DynamicScheduler(4, 4).schedule([16]).packs()] == [
        (0, 4, (0,))
    ]


@pytest.mark.parametrize("ranks", [2, 4, 6, 8, 12, 64])
@pytest.mark.parametrize("mode", ["free", "lockstep"])
def test_sizes_are_mixed_where_lengths_are_mixed(ranks, mode):
    lengths = [ranks * 8000] + [800] * (40 * ranks)
    plan = DynamicScheduler(ranks, 8000, H100, mode=mode).schedule(lengths)
    assert {pack.cp_size for pack in plan.packs() if 0 in pack.samples} == {ranks}
    assert {pack.cp_size for pack in plan.packs() if 0 not in pack.samples} == {1}


@pytest.mark.parametrize("mode", ["free", "lockstep"])
def test_equal_samples_take_one_rank_each(mode):
    plan = DynamicScheduler(8, 8000, mode=mode).schedule([4000] * 16)
    assert [pack.cp_size for pack in plan.packs()] == [1] * 8
    assert all(len(pack.samples) == 2 for pack in plan.packs())


@pytest.mark.parametrize("mode", ["free", "lockstep"])
def test_one_long_sample_is_spread_to_end_sooner(mode):
    assert [pack.cp_size for pack in DynamicScheduler(4, 99_999, mode=mode).schedule([80_000]).packs()] == [4]


def test_the_cost_model_decides_what_is_spread():
    """By tokens the long sample is a fifth of the work; by attention it is nearly all of it."""
    lengths = [1000] + [100] * 40

    def size(cost):
        plan = DynamicScheduler(4, 10_000, cost).schedule(lengths)
        return next(pack.cp_size for pack in plan.packs() if 0 in pack.samples)

    assert size(CostModel(1.0, 0.0, hop_latency=100.0)) == 1
    assert size(CostModel(0.0, 1.0, hop_latency=100.0)) == 4
    assert size(CostModel(0.0, 1.0, hop_latency=1e9)) == 1


# ------------------------------------------------------------------ options


@given(schedulers())
@quickly
def test_groups_that_fit_into_a_node_cross_only_if_they_are_the_largest_asked_for(case):
    scheduler, lengths = case
    nodes = scheduler.cost.ranks_per_node
    try:
        plan = scheduler.schedule(lengths)
    except PlanError:
        return
    if nodes is not None:
        assert {pack.cp_size for pack in crossing(plan, nodes) if pack.cp_size <= nodes} <= {
            limited_sizes(scheduler)[-1]
        }


@given(schedulers(min_context_parallel_size=1, max_context_parallel_size=None))
@quickly
def test_no_group_that_fits_into_a_node_crosses_where_all_sizes_may_be_used(case):
    scheduler, lengths = case
    nodes = scheduler.cost.ranks_per_node
    try:
        plan = scheduler.schedule(lengths)
    except PlanError:
        return
    assert nodes is None or not [pack for pack in crossing(plan, nodes) if pack.cp_size <= nodes]


def test_only_samples_too_long_for_a_node_cross():
    lengths = [60_000, 30_000, 9000] + [500] * 100
    scheduler = DynamicScheduler(16, 8192, ranks_per_node=4)
    plan = scheduler.schedule(lengths)
    assert {s for pack in crossing(plan, 4) for s in pack.samples} == {0}
    assert plan.extra["cost_model"]["ranks_per_node"] == 4
    assert crossing(DynamicScheduler(16, 8192).schedule([131_072]), 4)


@pytest.mark.parametrize("mode", ["free", "lockstep"])
def test_sizes_stay_within_their_limits(mode):
    lengths = lognormal_lengths(0, 200, 5.9, 1.3, 4 * 8192)
    plain = DynamicScheduler(8, 8192, mode=mode).schedule([*lengths, 32_768])
    assert min(pack.cp_size for pack in plain.packs()) == 1
    limited = DynamicScheduler(8, 8192, mode=mode, min_context_parallel_size=2, max_context_parallel_size=4)
    sizes = {pack.cp_size for pack in limited.schedule([*lengths, 32_768]).packs()}
    assert sizes == {2, 4}
    assert limited.sizes == (2, 4)
    with pytest.raises(SampleTooLongError, match="the largest context-parallel group has 4"):
        limited.schedule([*lengths, 32_769])


@pytest.mark.parametrize("mode", ["free", "lockstep"])
@pytest.mark.parametrize("slow", [0, 3, 7])
def test_a_slow_rank_gets_clearly_less_work(mode, slow):
    speeds = tuple(0.5 if rank == slow else 1.0 for rank in range(8))
    scheduler = DynamicScheduler(8, 8192, mode=mode, rank_speeds=speeds)
    for seed in range(3):
        lengths = lognormal_lengths(seed, 400, 5.5, 1.0, 8192)
        plan = scheduler.schedule(lengths)
        tokens = [sum(p.tokens(lengths) / p.cp_size for p in plan.packs_of(rank)) for rank in range(8)]
        others = [own for rank, own in enumerate(tokens) if rank != slow]
        assert tokens[slow] < 0.7 * min(others), tokens
        assert simulate(plan, H100, speeds).step_s <= 1.05 * plan.extra["lower_bound_s"]
        unaware = DynamicScheduler(8, 8192, mode=mode).schedule(lengths)
        assert simulate(plan, H100, speeds).step_s < 0.75 * simulate(unaware, H100, speeds).step_s


def test_equal_speeds_change_nothing_but_the_time():
    lengths = lognormal_lengths(0, 200, 5.9, 1.3, 65536)
    for mode in ("free", "lockstep"):
        plain = DynamicScheduler(8, 8192, mode=mode).schedule(lengths)
        twice = DynamicScheduler(8, 8192, mode=mode, rank_speeds=[2] * 8).schedule(lengths)
        ratio = twice.extra["predicted_step_s"] / plain.extra["predicted_step_s"]
        assert ratio == pytest.approx(0.5, rel=0.02)


@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "budgeted"])
@pytest.mark.parametrize("mode", ["free", "lockstep"])
def test_the_layout_asked_for_is_planned(layout, mode):
    plan = DynamicScheduler(4, 9, layout=layout, mode=mode).schedule([9, 3, 18, 2, 2, 2])
    assert {pack.layout for pack in plan.packs()} == {layout}
