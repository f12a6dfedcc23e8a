"""The simulator, against cases by hand and against one that goes from event to event."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dcp.errors import PlanError
from lightning_dcp.schedule import CostModel, Pack, StepPlan, simulate
from tests.schedule.oracles import makespan, pack_seconds, run_by_events
from tests.schedule.plans import cost_models, plans, schedulers, speeds_of

TOKENS = CostModel(linear=1.0, attention=0.0)
ROUNDS = ((Pack(0, 1, (0,)), Pack(1, 1, (1,)), Pack(2, 2, (2,))), (Pack(0, 2, (3,)),), (Pack(0, 4, (4,)),))
LENGTHS = (10, 30, 40, 8, 12)


def spans(plan, **options):
    return [(run.start, run.end) for run in simulate(plan, TOKENS, **options).runs]


def test_free_ranks_start_when_their_group_is_free():
    plan = StepPlan(4, 40, LENGTHS, ROUNDS)
    assert spans(plan) == [(0, 10), (0, 30), (0, 20), (30, 34), (34, 37)]
    simulation = simulate(plan, TOKENS)
    assert simulation.step_s == 37
    assert simulation.busy_share == pytest.approx((10 + 30 + 2 * 20 + 2 * 4 + 4 * 3) / (4 * 37))
    assert [run.microbatch for run in simulation.runs] == [0, 0, 0, 1, 2]
    assert [run.pack for run in simulation.runs] == list(plan.packs())


def test_a_rank_may_be_rounds_ahead_of_others():
    rounds = ((Pack(0, 1, (0,)), Pack(1, 1, (1,))), (Pack(1, 1, (2,)),), (Pack(1, 1, (3,)),))
    assert spans(StepPlan(2, 99, (50, 5, 5, 5), rounds)) == [(0, 50), (0, 5), (5, 10), (10, 15)]


def test_ranks_in_lockstep_wait_for_the_longest_pack_of_each_round():
    rounds = ((Pack(0, 1, (0,)), Pack(1, 1, (1,))), (Pack(0, 1, (2,)), Pack(1, 1, (3,))))
    assert spans(StepPlan(2, 99, (50, 5, 5, 20), rounds, "lockstep")) == [(0, 50), (0, 5), (50, 55), (50, 70)]


def test_a_group_is_as_fast_as_its_slowest_rank():
    plan = StepPlan(4, 40, LENGTHS, ROUNDS)
    took = spans(plan, speeds=[1.0, 2.0, 4.0, 0.5])
    assert took == [(0, 10), (0, 15), (0, 40), (15, 19), (40, 46)]


def test_first_ranks_decide_whether_a_pack_spans_nodes():
    cost = CostModel(linear=1.0, attention=0.0, hop_latency=1.0, internode_latency=100.0, ranks_per_node=3)
    plan = StepPlan(6, 40, (10, 10, 10), ((Pack(0, 2, (0,)), Pack(2, 2, (1,)), Pack(4, 2, (2,))),))
    assert [run.end for run in simulate(plan, cost).runs] == [6, 105, 6]


def test_a_plan_without_packs_takes_no_time():
    simulation = simulate(StepPlan(4, 8, (), ()), TOKENS)
    assert (simulation.step_s, simulation.busy_share, simulation.runs) == (0.0, 0.0, ())


@given(plans(longest=5000), cost_models(), st.data())
@settings(max_examples=80, deadline=None)
def test_random_plans_take_as_long_as_event_by_event(plan, cost, data):
    speeds = data.draw(st.one_of(st.none(), speeds_of(plan.ranks)))
    simulation = simulate(plan, cost, speeds)
    expected = run_by_events(plan, cost, speeds)
    names = [(number, place) for number, packs in enumerate(plan.microbatches) for place in range(len(packs))]
    assert len(simulation.runs) == len(names)
    for run, name in zip(simulation.runs, names, strict=True):
        assert run.pack == plan.microbatches[name[0]][name[1]]
        assert (run.start, run.end) == pytest.approx(expected[name], rel=1e-9)
    assert simulation.step_s == pytest.approx(max(end for _, end in expected.values()), rel=1e-9)


@given(schedulers(planes=range(1, 17), most=20))
@settings(max_examples=60, deadline=None)
def test_planned_steps_take_as_long_as_event_by_event(case):
    scheduler, lengths = case
    try:
        plan = scheduler.schedule(lengths)
    except PlanError:
        return
    step = simulate(plan, scheduler.cost, scheduler.rank_speeds).step_s
    assert step == pytest.approx(makespan(plan, scheduler.cost, scheduler.rank_speeds), rel=1e-9)


@given(plans(mode="lockstep", longest=5000), cost_models())
@settings(max_examples=60, deadline=None)
def test_a_lockstep_plan_takes_the_sum_of_its_longest_packs(plan, cost):
    longest = [
        max(pack_seconds(cost, [plan.lengths[s] for s in p.samples], p.cp_size, p.first_rank) for p in packs)
        for packs in plan.microbatches
    ]
    assert simulate(plan, cost).step_s == pytest.approx(sum(longest), rel=1e-9)


@given(plans(longest=5000), cost_models(), st.integers(-3, 3))
@settings(max_examples=60, deadline=None)
def test_ranks_of_twice_the_speed_take_half_as_long(plan, cost, doublings):
    speed = 2.0**doublings
    assert simulate(plan, cost, [speed] * plan.ranks).step_s == simulate(plan, cost).step_s / speed


@given(plans(longest=5000), cost_models())
@settings(max_examples=60, deadline=None)
def test_busy_shares_are_shares_and_one_for_a_single_rank(plan, cost):
    share = simulate(plan, cost).busy_share
    assert 0 < share <= 1 + 1e-12
    if plan.ranks == 1:
        assert share == pytest.approx(1)
