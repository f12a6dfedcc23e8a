import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dcp.errors import PlanError, SampleTooLongError
from lightning_dcp.schedule import CostModel, DynamicScheduler, StaticScheduler
from lightning_dcp.schedule.static import pack_in_order
from tests.schedule.plans import batches, in_two_processes, lognormal_lengths, makespan, sizes_of, walk

quickly = settings(max_examples=80, deadline=None)


def static_for(ranks, limit, lengths):
    """The static scheduler with the smallest size that holds the longest sample."""
    size = next(c for c in sizes_of(ranks) if c * limit >= max(lengths))
    return StaticScheduler(ranks, limit, size)


@st.composite
def scheduled(draw):
    ranks, limit, lengths = draw(batches())
    if draw(st.booleans()):
        return DynamicScheduler(ranks, limit), lengths
    fitting = [c for c in sizes_of(ranks) if c * limit >= max(lengths)]
    return StaticScheduler(ranks, limit, draw(st.sampled_from(fitting))), lengths


@given(scheduled())
@quickly
def test_every_plan_keeps_the_rules(case):
    """Counted here, not by the plan's own check."""
    scheduler, lengths = case
    plan = scheduler.schedule(lengths)
    created = {(first, c) for c in sizes_of(scheduler.ranks) for first in range(0, scheduler.ranks, c)}
    planned = []
    for microbatch in plan.microbatches:
        busy = []
        for pack in microbatch:
            assert (pack.first_rank, pack.cp_size) in created
            assert list(pack.samples) == sorted(pack.samples)
            assert sum(lengths[s] for s in pack.samples) <= pack.cp_size * scheduler.max_seqlen_per_dp_cp_rank
            assert pack.layout == scheduler.layout
            planned += pack.samples
            busy += pack.ranks
        assert len(busy) == len(set(busy))
    assert sorted(planned) == list(range(len(lengths)))
    assert plan.lengths == tuple(lengths)
    assert (plan.ranks, plan.mode) == (scheduler.ranks, "free")
    assert plan.max_seqlen_per_dp_cp_rank == scheduler.max_seqlen_per_dp_cp_rank
    plan.validate()


@given(scheduled())
@quickly
def test_ranks_that_walk_their_own_lists_never_wait_for_each_other_forever(case):
    scheduler, lengths = case
    assert walk(scheduler.schedule(lengths)) == {}


@given(scheduled())
@quickly
def test_the_same_lengths_give_the_same_plan(case):
    scheduler, lengths = case
    first = scheduler.schedule(lengths)
    again = type(scheduler)(**vars(scheduler)).schedule(tuple(lengths))
    assert first == again
    assert first.digest() == again.digest()


def test_processes_agree_on_the_plan():
    program = (
        "from lightning_dcp.schedule import DynamicScheduler, StaticScheduler\n"
        "lengths = [(7 * i * i) % 501 + 1 for i in range(60)]\n"
        "print(*(s.schedule(lengths).digest() for s in (DynamicScheduler(12, 64), StaticScheduler(12, 64, 12))))"
    )
    first, second = in_two_processes(program)
    assert first == second
    assert len(first) == 2


@given(batches())
@quickly
def test_static_groups_all_have_the_one_size(case):
    ranks, limit, lengths = case
    scheduler = static_for(ranks, limit, lengths)
    assert {pack.cp_size for pack in scheduler.schedule(lengths).packs()} == {scheduler.context_parallel_size}


@given(batches())
@quickly
def test_dynamic_uses_no_more_ranks_than_tokens_unless_the_limit_forces_it(case):
    ranks, limit, lengths = case
    for pack in DynamicScheduler(ranks, limit).schedule(lengths).packs():
        for sample in pack.samples:
            smallest = next(c for c in sizes_of(ranks) if c * limit >= lengths[sample])
            assert pack.cp_size <= max(lengths[sample], smallest)


@given(batches())
@quickly
def test_dynamic_runs_large_groups_first_on_every_rank(case):
    ranks, limit, lengths = case
    plan = DynamicScheduler(ranks, limit).schedule(lengths)
    for rank in range(ranks):
        sizes = [pack.cp_size for pack in plan.packs_of(rank)]
        assert sizes == sorted(sizes, reverse=True)


# ------------------------------------------------------------------ small cases


@pytest.mark.parametrize("scheduler", [DynamicScheduler(4, 4), StaticScheduler(4, 4, 4)], ids=["dynamic", "static"])
def test_one_document_that_needs_all_ranks_gets_them(scheduler):
    plan = scheduler.schedule([16])
    assert [(p.first_rank, p.cp_size, p.samples) for p in plan.packs()] == [(0, 4, (0,))]


def test_one_long_document_and_four_short_ones():
    plan = DynamicScheduler(4, 8).schedule([8, 4, 4, 4, 4])
    assert sorted(s for pack in plan.packs() for s in pack.samples) == [0, 1, 2, 3, 4]
    assert sum(sum(pack.tokens(plan.lengths) for pack in m) for m in plan.microbatches) == 24


@pytest.mark.parametrize("ranks", [2, 4, 6, 8, 12, 64])
def test_dynamic_mixes_sizes_where_lengths_are_mixed(ranks):
    lengths = [ranks * 1000] + [100] * (8 * ranks)
    plan = DynamicScheduler(ranks, 1000).schedule(lengths)
    sizes = {pack.cp_size for pack in plan.packs()}
    assert sizes == {1, ranks}
    assert all(pack.cp_size == (ranks if 0 in pack.samples else 1) for pack in plan.packs())


def test_equal_samples_take_one_rank_each():
    plan = DynamicScheduler(8, 100).schedule([50] * 16)
    assert [pack.cp_size for pack in plan.packs()] == [1] * 8
    assert all(len(pack.samples) == 2 for pack in plan.packs())


def test_one_sample_a_few_ranks_long_is_spread_to_end_sooner():
    plan = DynamicScheduler(4, 10_000).schedule([8_000])
    assert [pack.cp_size for pack in plan.packs()] == [4]


def test_the_cost_model_decides_what_is_spread():
    """By tokens the long sample is a fifth of the work; by attention it is nearly all of it."""
    lengths = [1000] + [100] * 40
    by_tokens = DynamicScheduler(4, 10_000, CostModel(1.0, 0.0)).schedule(lengths)
    by_attention = DynamicScheduler(4, 10_000, CostModel(0.0, 1.0)).schedule(lengths)

    def size(plan):
        return next(pack.cp_size for pack in plan.packs() if 0 in pack.samples)

    assert (size(by_tokens), size(by_attention)) == (1, 4)


def test_static_shares_tokens_out_evenly():
    plan = StaticScheduler(4, 100, 2).schedule([10, 20, 20, 50])
    tokens = {first: sum(p.tokens(plan.lengths) for p in plan.packs() if p.first_rank == first) for first in (0, 2)}
    assert tokens == {0: 50, 2: 50}


@given(st.lists(st.integers(1, 20), min_size=1, max_size=30))
def test_packing_fills_the_first_pack_with_room(lengths):
    packs = pack_in_order(range(len(lengths)), lengths, 20)
    assert sorted(s for pack in packs for s in pack) == list(range(len(lengths)))
    for later, pack in enumerate(packs):
        assert list(pack) == sorted(pack)
        for earlier in packs[:later]:
            came_before = sum(lengths[s] for s in earlier if s < pack[0])
            assert came_before + lengths[pack[0]] > 20


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_the_layout_asked_for_is_planned(layout):
    for scheduler in (DynamicScheduler(4, 9, layout=layout), StaticScheduler(4, 9, 2, layout=layout)):
        assert {pack.layout for pack in scheduler.schedule([9, 3, 18]).packs()} == {layout}


# ------------------------------------------------------------------ what is refused

SCHEDULERS = pytest.mark.parametrize(
    "scheduler", [DynamicScheduler(4, 10), StaticScheduler(8, 10, 4)], ids=["dynamic", "static"]
)


@SCHEDULERS
def test_a_sample_too_long_for_the_largest_group_is_named(scheduler):
    scheduler.schedule([3, 40])
    with pytest.raises(SampleTooLongError) as caught:
        scheduler.schedule([3, 40, 41, 99])
    error = caught.value
    assert (error.sample, error.length, error.ranks, error.max_seqlen_per_dp_cp_rank) == (2, 41, 4, 10)
    assert re.search(
        r"sample 2 of the batch has 41 tokens; at max_seqlen_per_dp_cp_rank=10 it would need 5 ranks, and the largest "
        r"context-parallel group has 4\. The largest length that fits is 40:",
        str(error),
    )
    assert "sample 2 of the batch (id 777) has 41 tokens" in str(error.named(777))


@SCHEDULERS
def test_an_empty_batch_is_refused(scheduler):
    with pytest.raises(PlanError, match="empty batch"):
        scheduler.schedule([])


@SCHEDULERS
@pytest.mark.parametrize("length", [0, -3])
def test_an_empty_sample_is_refused(scheduler, length):
    with pytest.raises(PlanError, match=f"sample 1 has {length} tokens"):
        scheduler.schedule([3, length, 2])


@pytest.mark.parametrize(("ranks", "size"), [(6, 4), (8, 3), (2, 4), (4, 0), (4, -1)])
def test_a_static_size_that_does_not_divide_the_plane_is_refused(ranks, size):
    with pytest.raises(PlanError, match=f"context_parallel_size={size} does not divide the plane of {ranks} ranks"):
        StaticScheduler(ranks, 100, size).schedule([5, 5])


# ------------------------------------------------------------------ how good the plans are

COSTS = {"7B": CostModel(), "small": CostModel(attention=1 / 800)}


@pytest.mark.parametrize("cost", COSTS.values(), ids=COSTS.keys())
@pytest.mark.parametrize("ranks", [1, 2, 4, 6, 8, 12, 32, 64])
def test_dynamic_steps_take_no_longer_than_static_ones_and_less_on_average(ranks, cost):
    """Against the smallest static size that holds the longest sample, which is what a user would have to set."""
    ratios = []
    for seed in range(20):
        limit = (4096, 8192, 16384)[seed % 3]
        lengths = lognormal_lengths(seed, ranks, limit)
        dynamic = makespan(DynamicScheduler(ranks, limit, cost).schedule(lengths), cost)
        static = makespan(static_for(ranks, limit, lengths).schedule(lengths), cost)
        ratios.append(dynamic / static)
    assert max(ratios) <= 1.05, ratios
    assert sum(ratios) / len(ratios) <= (0.99 if ranks > 1 else 1.0 + 1e-12)


@given(batches(planes=(1, 2, 4, 6, 8, 12)), st.sampled_from(list(COSTS.values())))
@quickly
def test_no_plan_ends_before_all_its_work_could_be_done(case, cost):
    """The simulator's own check: work is neither lost nor made."""
    ranks, limit, lengths = case
    work = sum(cost.sample(n) for n in lengths)
    for scheduler in (DynamicScheduler(ranks, limit, cost), static_for(ranks, limit, lengths)):
        took = makespan(scheduler.schedule(lengths), cost)
        assert work / ranks <= took * (1 + 1e-9)
        cuts = sum(len(p.samples) * (p.cp_size - 1) for p in scheduler.schedule(lengths).packs())
        assert took <= (work + cuts * cost.hop) * (1 + 1e-9)


@given(batches(planes=(2, 4, 6, 8)), st.integers(-20, 20))
@quickly
def test_only_the_ratio_of_costs_matters(case, doublings):
    ranks, limit, lengths = case
    plain = CostModel()
    scaled = CostModel(*(value * 2.0**doublings for value in (plain.linear, plain.attention, plain.hop)))
    plans = [DynamicScheduler(ranks, limit, cost).schedule(lengths) for cost in (plain, scaled)]
    assert plans[0] == plans[1]


def test_many_samples_are_planned_in_seconds():
    lengths = [length for seed in range(300) for length in lognormal_lengths(seed, 8, 8192)]
    assert len(lengths) > 3000
    plan = DynamicScheduler(8, 8192).schedule(lengths)
    assert sum(len(pack.samples) for pack in plan.packs()) == len(lengths)


@pytest.mark.parametrize(("length", "seconds"), [(1, 3.5), (10, 80.0), (0, 0.0)])
def test_cost_of_a_sample(length, seconds):
    assert CostModel(linear=3.0, attention=0.5).sample(length) == seconds
