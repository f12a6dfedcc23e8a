"""Plans for ranks in lock-step: no rank without a pack, and a refusal only where there is no such plan."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dcp.errors import PlanError, SampleTooLongError
from lightning_dcp.schedule import DynamicScheduler, lower_bound_s, preset, simulate
from tests.schedule.oracles import Cheapest, broken_rules, lockstep_is_possible, makespan, sizes_of, walk
from tests.schedule.plans import cost_models, lognormal_lengths, schedulers, speeds_of

quickly = settings(max_examples=60, deadline=None)
POWERS = (1, 2, 4, 8, 16)
lockstep_schedulers = schedulers(mode="lockstep")


def planned(scheduler, lengths):
    """The plan, or ``None`` if the batch is refused as impossible."""
    try:
        return scheduler.schedule(lengths)
    except SampleTooLongError:
        raise
    except PlanError as error:
        assert "lock-step" in str(error)
        return None


def one_size_would_do(scheduler, lengths):
    limit, multiple = scheduler.max_seqlen_per_dp_cp_rank, scheduler.microbatch_multiple
    return any(lockstep_is_possible(lengths, scheduler.ranks, limit, c, multiple) for c in scheduler.sizes)


# ------------------------------------------------------------------ rules


@pytest.mark.parametrize("ranks", range(1, 65))
def test_plans_of_every_plane_keep_all_rules(ranks):
    generator = random.Random(ranks)
    for count in (1, 3, 70):
        scheduler = DynamicScheduler(ranks, 1000, mode="lockstep")
        longest = generator.choice([300, 1000, 1000 * ranks])
        lengths = [max(1, min(longest, int(generator.lognormvariate(5, 2)))) for _ in range(count)] + [longest]
        plan = scheduler.schedule(lengths)
        plan.validate()
        assert broken_rules(scheduler, lengths, plan) == []
        assert walk(plan) == {}
        assert {len(plan.packs_of(rank)) for rank in range(ranks)} == {len(plan.microbatches)}


@given(lockstep_schedulers)
@quickly
def test_plans_keep_all_rules_with_any_options(case):
    scheduler, lengths = case
    plan = planned(scheduler, lengths)
    if plan is None:
        assert not one_size_would_do(scheduler, lengths)
        return
    plan.validate()
    assert broken_rules(scheduler, lengths, plan) == []
    assert walk(plan) == {}


@given(lockstep_schedulers)
@quickly
def test_the_predicted_step_is_the_simulated_one(case):
    scheduler, lengths = case
    plan = planned(scheduler, lengths)
    if plan is None:
        return
    seconds = plan.extra["predicted_step_s"]
    assert seconds == pytest.approx(simulate(plan, scheduler.cost, scheduler.rank_speeds).step_s, rel=1e-9)
    assert seconds == pytest.approx(makespan(plan, scheduler.cost, scheduler.rank_speeds), rel=1e-9)
    limits = scheduler.ranks, scheduler.max_seqlen_per_dp_cp_rank, scheduler.cost
    bound = lower_bound_s(lengths, *limits, sizes=scheduler.sizes, mode="lockstep", speeds=scheduler.rank_speeds)
    assert plan.extra["lower_bound_s"] == bound <= seconds * (1 + 1e-9)


# ------------------------------------------------------------------ possible or not


@st.composite
def scarce(draw):
    """Few samples for many ranks and rounds, and little room: just possible, or just not."""
    ranks = draw(st.sampled_from(POWERS))
    largest = draw(st.sampled_from(sizes_of(ranks)))
    scheduler = DynamicScheduler(
        ranks,
        draw(st.sampled_from([1, 4, 10])),
        mode="lockstep",
        max_context_parallel_size=largest,
        microbatch_multiple=draw(st.integers(1, 4)),
    )
    capacity = largest * scheduler.max_seqlen_per_dp_cp_rank
    return scheduler, draw(st.lists(st.integers(1, capacity), min_size=1, max_size=9))


@given(scarce())
@settings(max_examples=200, deadline=None)
def test_a_batch_is_refused_if_and_only_if_no_plan_exists(case):
    """On these planes all groups nest in the largest ones, so whether those can be filled decides."""
    scheduler, lengths = case
    limits = scheduler.ranks, scheduler.max_seqlen_per_dp_cp_rank, scheduler.sizes[-1]
    plan = planned(scheduler, lengths)
    assert (plan is not None) == lockstep_is_possible(lengths, *limits, scheduler.microbatch_multiple)
    if plan is not None:
        assert broken_rules(scheduler, lengths, plan) == []


@pytest.mark.parametrize(
    ("ranks", "limit", "largest", "multiple", "lengths"),
    [
        (4, 4, 4, 2, [5, 12, 9]),  # 5 and 9 on all four ranks, 12 on all four
        (16, 1, 8, 1, [5, 8, 2, 8, 7]),  # 5 and 2 on eight ranks
        (4, 10, 4, 4, [15, 36, 25, 22, 30]),  # 15 and 25, or 15 and 22
        (8, 4, 8, 4, [27, 13, 18, 26, 29, 6]),
    ],
)
def test_batches_that_just_fit_are_planned(ranks, limit, largest, multiple, lengths):
    """Only packs of some two or three samples that are not next to each other leave as few packs as are needed."""
    scheduler = DynamicScheduler(
        ranks, limit, mode="lockstep", max_context_parallel_size=largest, microbatch_multiple=multiple
    )
    assert broken_rules(scheduler, lengths, scheduler.schedule(lengths)) == []


@given(st.sampled_from([1, 2, 3, 4]), st.sampled_from([2, 5]), st.integers(1, 3), st.data())
@settings(max_examples=60, deadline=None)
def test_the_rule_of_what_is_possible_agrees_with_trying_all_plans(ranks, limit, multiple, data):
    lengths = data.draw(st.lists(st.integers(1, ranks * limit), min_size=1, max_size=4))
    best = Cheapest(lengths, ranks, limit, preset("cpu")).lockstep(multiple)
    assert math.isfinite(best) == lockstep_is_possible(lengths, ranks, limit, ranks, multiple)


@pytest.mark.parametrize("ranks", [2, 4, 6, 8, 12, 64])
def test_one_sample_is_enough_for_any_plane(ranks):
    for length in (1, 900, 1000 * ranks):
        (pack,) = DynamicScheduler(ranks, 1000, mode="lockstep").schedule([length]).packs()
        assert pack.cp_size == ranks


def test_too_few_samples_are_told_with_what_to_do():
    scheduler = DynamicScheduler(8, 100, mode="lockstep", max_context_parallel_size=2)
    with pytest.raises(PlanError) as caught:
        scheduler.schedule([5, 5, 5])
    assert "3 sample(s)" in str(caught.value)
    assert "max_context_parallel_size" in str(caught.value)
    assert "larger batches" in str(caught.value)
    assert "dynamic scheduler" not in str(caught.value)
    scheduler.schedule([5, 5, 5, 5])


def test_fewer_samples_than_rounds_are_refused():
    scheduler = DynamicScheduler(4, 100, mode="lockstep", microbatch_multiple=3)
    assert [len(m) for m in scheduler.schedule([50, 50, 50]).microbatches] == [1, 1, 1]
    with pytest.raises(PlanError, match="lock-step"):
        scheduler.schedule([50, 50])


# ------------------------------------------------------------------ options


@pytest.mark.parametrize("multiple", [1, 2, 3, 4, 8])
def test_the_number_of_rounds_is_a_multiple(multiple):
    scheduler = DynamicScheduler(8, 8192, mode="lockstep", microbatch_multiple=multiple)
    for seed in range(4):
        lengths = lognormal_lengths(seed, 200, 5.9, 1.3, 65536)
        plan = scheduler.schedule(lengths)
        assert len(plan.microbatches) % multiple == 0
        assert broken_rules(scheduler, lengths, plan) == []
        fewest = -(-sum(lengths) // (8 * 8192 * multiple)) * multiple
        assert len(plan.microbatches) <= fewest + 2 * multiple


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_tiny_batches_are_planned_no_better_than_by_trying_all_plans(ranks):
    generator = random.Random(ranks)
    ratios = []
    for _ in range(15):
        lengths = [generator.randint(1, ranks * 4000) for _ in range(generator.randint(1, 5 if ranks < 3 else 4))]
        best = Cheapest(lengths, ranks, 4000, preset("h100")).lockstep()
        plan = DynamicScheduler(ranks, 4000, mode="lockstep").schedule(lengths)
        ratios.append(plan.extra["predicted_step_s"] / best)
    assert min(ratios) >= 1 - 1e-9
    assert sum(ratios) / len(ratios) <= 1.03, ratios


@given(st.sampled_from([2, 4]), cost_models(), st.data())
@settings(max_examples=25, deadline=None)
def test_slow_ranks_do_not_make_a_plan_better_than_the_best(ranks, cost, data):
    speeds = data.draw(speeds_of(ranks))
    lengths = data.draw(st.lists(st.integers(1, ranks * 1000), min_size=1, max_size=4))
    best = Cheapest(lengths, ranks, 1000, cost, speeds).lockstep()
    plan = DynamicScheduler(ranks, 1000, cost, mode="lockstep", rank_speeds=speeds).schedule(lengths)
    assert plan.extra["predicted_step_s"] >= best * (1 - 1e-9)
