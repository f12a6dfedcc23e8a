"""The lower bound: exact where a hand can work it out, and below every plan there is."""

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dcp.errors import PlanError
from lightning_dcp.schedule import CostModel, DynamicScheduler, StaticScheduler, lower_bound_s, preset, simulate
from tests.schedule.oracles import Cheapest, makespan, pack_seconds, sizes_of
from tests.schedule.plans import batches, cost_models, lognormal_lengths, plans, schedulers, speeds_of

quickly = settings(max_examples=80, deadline=None)
ROUNDING = 1 + 1e-9
TOKENS = CostModel(linear=1.0, attention=0.0)


def bound_of(lengths, ranks, limit, cost, **options):
    return lower_bound_s(lengths, ranks, limit, cost, **{"sizes": sizes_of(ranks)} | options)


# ------------------------------------------------------------------ exact

MODES = pytest.mark.parametrize("mode", ["free", "lockstep"])


@MODES
@pytest.mark.parametrize("per_rank", [1, 3, 8])
@pytest.mark.parametrize("ranks", [1, 3, 4, 8])
def test_equal_samples_that_divide_evenly_are_bounded_exactly(mode, per_rank, ranks):
    """Each rank has as many, in one pack."""
    cost = preset("h100")
    lengths = [1000] * (per_rank * ranks)
    best = pack_seconds(cost, [1000] * per_rank, 1)
    assert bound_of(lengths, ranks, 8192, cost, mode=mode) == pytest.approx(best, rel=1e-9)


@MODES
@pytest.mark.parametrize(("limit", "packs"), [(80, 1), (79, 2), (40, 2), (39, 3), (20, 4)])
def test_each_pack_that_the_limit_forces_has_its_overhead(mode, limit, packs):
    """Two ranks with 80 tokens each."""
    cost = CostModel(linear=1.0, attention=0.0, pack_overhead=10.0)
    expected = 80 + 10 * packs
    if mode == "free" and limit in (79, 39):  # one rank may hold less; the packs' overhead is shared by two ranks
        expected = pytest.approx(80 + 10 * -(-160 // limit) / 2, rel=0.07)
    assert bound_of([10] * 16, 2, limit, cost, mode=mode) == expected


@MODES
def test_a_sample_that_needs_the_plane_takes_all_its_hops(mode):
    cost = CostModel(linear=1.0, attention=0.0, pack_overhead=7.0, hop_latency=3.0)
    assert bound_of([400], 4, 100, cost, mode=mode) == 7 + 100 + 3 * 3


@MODES
def test_a_sample_is_cut_only_as_far_as_that_helps(mode):
    """100 s on one rank; 50 + 20 on two; 25 + 60 on four."""
    cost = CostModel(linear=1.0, attention=0.0, hop_latency=20.0)
    assert bound_of([100], 4, 100, cost, mode=mode) == 70


def test_work_is_shared_by_speed():
    assert bound_of([10] * 3, 2, 100, TOKENS, speeds=[0.5, 1.0]) == pytest.approx(20)
    assert bound_of([10] * 3, 2, 100, TOKENS, mode="lockstep", speeds=[0.5, 1.0]) == pytest.approx(20)
    assert bound_of([10] * 4, 2, 100, TOKENS, speeds=[2.0, 2.0]) == pytest.approx(10)


def test_one_sample_runs_on_the_fastest_ranks():
    assert bound_of([12], 4, 100, CostModel(1.0, 0.0, hop_latency=100.0), speeds=[0.5, 1.0, 3.0, 0.1]) == 4


def test_in_lockstep_a_long_sample_keeps_other_ranks_waiting():
    """Beside the long one there is room for 100 tokens (1000 s); the other 200 take both ranks another 1000 s."""
    cost = CostModel(linear=0.0, attention=1.0)
    lengths = [100] + [10] * 30
    assert bound_of(lengths, 2, 100, cost, sizes=[1]) == 10_000
    assert bound_of(lengths, 2, 100, cost, sizes=[1], mode="lockstep") == pytest.approx(11_000)
    plan = DynamicScheduler(2, 100, cost, mode="lockstep", max_context_parallel_size=1).schedule(lengths)
    assert simulate(plan, cost).step_s == pytest.approx(11_000, rel=0.02)


def test_hidden_transfers_cost_nothing_and_seen_ones_what_is_left():
    cost = CostModel(linear=0.0, attention=1.0, hop_bytes=1.0, bandwidth=0.1, overlap=1.0)
    # 40 tokens on two ranks: 800 s of attention, half of it hides 20 tokens x 10 s
    assert bound_of([40], 2, 20, cost) == 800
    # 10 tokens: 50 s, 25 s of which hide half of a transfer of 50 s
    assert bound_of([10], 2, 5, cost) == 75


# ------------------------------------------------------------------ below every plan


@given(plans(longest=5000), cost_models(), st.data())
@quickly
def test_no_random_plan_is_faster(plan, cost, data):
    speeds = data.draw(st.one_of(st.none(), speeds_of(plan.ranks)))
    bound = bound_of(plan.lengths, plan.ranks, plan.max_seqlen_per_dp_cp_rank, cost, mode=plan.mode, speeds=speeds)
    assert 0 < bound <= simulate(plan, cost, speeds).step_s * ROUNDING


@given(batches(planes=(1, 2, 4, 6, 8, 12)), cost_models(), st.sampled_from(["free", "lockstep"]), st.data())
@quickly
def test_no_static_plan_is_faster(batch, cost, mode, data):
    ranks, limit, lengths = batch
    speeds = data.draw(st.one_of(st.none(), speeds_of(ranks)))
    bound = bound_of(lengths, ranks, limit, cost, mode=mode, speeds=speeds)
    for c in [c for c in sizes_of(ranks) if max(lengths) <= c * limit]:
        try:
            plan = StaticScheduler(ranks, limit, c, mode=mode).schedule(lengths)
        except PlanError:
            continue
        step = simulate(plan, cost, speeds).step_s
        assert bound <= step * ROUNDING
        assert bound_of(lengths, ranks, limit, cost, mode=mode, speeds=speeds, sizes=[c]) <= step * ROUNDING


@given(schedulers())
@quickly
def test_no_dynamic_plan_is_faster(case):
    scheduler, lengths = case
    try:
        plan = scheduler.schedule(lengths)
    except PlanError:
        return
    step = makespan(plan, scheduler.cost, scheduler.rank_speeds)
    limits = scheduler.ranks, scheduler.max_seqlen_per_dp_cp_rank, scheduler.cost
    for sizes in (scheduler.sizes, sizes_of(scheduler.ranks)):
        options = {"mode": scheduler.mode, "speeds": scheduler.rank_speeds, "sizes": sizes}
        assert bound_of(lengths, *limits, **options) <= step * ROUNDING


@st.composite
def tiny(draw):
    ranks = draw(st.integers(1, 4))
    limit = draw(st.sampled_from([3, 50, 4000]))
    lengths = draw(st.lists(st.integers(1, ranks * limit), min_size=1, max_size=4))
    return lengths, ranks, limit, draw(cost_models()), draw(st.one_of(st.none(), speeds_of(ranks)))


@given(tiny())
@settings(max_examples=40, deadline=None)
def test_the_best_of_all_free_plans_is_not_faster(case):
    *batch, speeds = case
    best = Cheapest(*batch, speeds).free()
    assert bound_of(*batch, speeds=speeds) <= best * ROUNDING
    assert DynamicScheduler(*batch[1:], rank_speeds=speeds).schedule(batch[0]).extra["predicted_step_s"] >= best / (
        ROUNDING
    )


@given(tiny())
@settings(max_examples=60, deadline=None)
def test_the_best_of_all_lockstep_plans_is_not_faster(case):
    *batch, speeds = case
    best = Cheapest(*batch, speeds).lockstep()
    assert math.isfinite(best)
    assert bound_of(*batch, speeds=speeds, mode="lockstep") <= best * ROUNDING


# ------------------------------------------------------------------ not far below


@given(batches(planes=(1, 2, 4, 6, 8)), cost_models(), st.sampled_from(["free", "lockstep"]))
@quickly
def test_it_is_not_below_the_work_or_the_longest_sample(batch, cost, mode):
    ranks, limit, lengths = batch
    cost = replace(cost, ranks_per_node=None)
    fitting = [[c for c in sizes_of(ranks) if n <= c * limit] for n in lengths]
    quickest = max(min(pack_seconds(cost, [n], c) for c in sizes) for n, sizes in zip(lengths, fitting, strict=True))
    compute = replace(cost, hop_latency=0.0, hop_bytes=0.0, pack_overhead=0.0)
    work = sum(min(c * pack_seconds(compute, [n], c) for c in sizes) for n, sizes in zip(lengths, fitting, strict=True))
    packs = -(-sum(lengths) // limit)
    least = max(quickest, (work + packs * cost.pack_overhead) / ranks)
    assert bound_of(lengths, ranks, limit, cost, mode=mode) >= least * (1 - 1e-9)


@MODES
def test_tiny_batches_are_bounded_closely(mode):
    """Against the best of all plans; what it leaves out is that samples are whole."""
    generator = random.Random(0)
    shares = []
    for _ in range(25):
        lengths = [generator.randint(1, 8000) for _ in range(4)]
        cheapest = Cheapest(lengths, 2, 4000, preset("h100"))
        best = cheapest.free() if mode == "free" else cheapest.lockstep()
        shares.append(bound_of(lengths, 2, 4000, preset("h100"), mode=mode) / best)
    assert max(shares) <= ROUNDING
    assert sum(shares) / len(shares) > 0.95


@MODES
def test_fewer_sizes_or_slower_ranks_never_lower_it(mode):
    for seed in range(5):
        lengths = lognormal_lengths(seed, 64, 6.5, 1.2, 32768)
        options = {"mode": mode}
        bound = bound_of(lengths, 8, 8192, preset("h100"), **options)
        for sizes in ([4], [1, 4], [2, 4, 8], [8]):
            assert bound_of(lengths, 8, 8192, preset("h100"), sizes=sizes, **options) >= bound * (1 - 2e-4)
        slow = bound_of(lengths, 8, 8192, preset("h100"), speeds=[1.0] * 7 + [0.5], **options)
        if mode == "free":
            assert slow >= bound * (1 - 2e-4)
        assert bound_of(lengths, 8, 8192, preset("h100"), mode="lockstep") >= bound * (1 - 2e-4)
