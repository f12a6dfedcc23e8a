"""Numbers of plans, against counts by hand."""

import json
import math

import pytest
from hypothesis import given, settings

from lightning_dcp.errors import PlanError
from lightning_dcp.schedule import CostModel, Pack, StepPlan, simulate
from lightning_dcp.schedule.summary import mean_summary, summarize
from tests.schedule.plans import plans

COST = CostModel(linear=1.0, attention=0.0, pack_overhead=10.0)
PLAN = StepPlan(
    ranks=4,
    max_seqlen_per_dp_cp_rank=100,
    lengths=(150, 50, 30, 101),
    microbatches=((Pack(0, 2, (0,)), Pack(2, 1, (1,)), Pack(3, 1, (2,))), (Pack(2, 2, (3,)),)),
)


def test_the_numbers_of_a_plan_are_those_counted_by_hand():
    PLAN.validate()
    summary = summarize(PLAN, COST, lower_bound_s=100.0, planning_s=0.5)
    # the groups take 85, 60 and 40 s; the last one starts when both its ranks are done, at 60 s, and takes 60.5 s
    assert summary.predicted_step_s == 120.5
    assert summary.busy_share == pytest.approx((2 * 85 + 60 + 40 + 2 * 60.5) / (4 * 120.5))
    assert summary.share_of_lower_bound == pytest.approx(100 / 120.5)
    assert summary.tokens == 331
    assert summary.padding_to_multiples == 2 + 3  # 150 -> 152, 101 -> 104; packs on one rank need none
    assert summary.padding_share == pytest.approx(5 / 331)
    assert summary.capacity == 600
    assert summary.fill == pytest.approx(331 / 600)
    assert summary.packs_by_cp_size == {1: 2, 2: 2}
    assert summary.microbatches == 2
    assert (summary.tokens_per_rank_min, summary.tokens_per_rank_max) == (75, 100.5)
    assert summary.planning_s == 0.5


def test_lock_step_and_slow_ranks_show_in_the_time():
    lock = StepPlan(
        2, 100, (80, 20, 30, 90), ((Pack(0, 1, (0,)), Pack(1, 1, (1,))), (Pack(0, 1, (2,)), Pack(1, 1, (3,))))
    )
    free = summarize(lock, COST, lower_bound_s=1.0)
    assert free.predicted_step_s == 90 + 40
    barrier = StepPlan(2, 100, lock.lengths, lock.microbatches, "lockstep")
    assert summarize(barrier, COST, lower_bound_s=1.0).predicted_step_s == 90 + 100
    assert summarize(lock, COST, lower_bound_s=1.0, speeds=[1.0, 0.5]).predicted_step_s == 60 + 200


@settings(max_examples=60, deadline=None)
@given(plans())
def test_summaries_keep_the_plans_own_numbers(plan):
    summary = summarize(plan, COST, lower_bound_s=1.0)
    assert summary.predicted_step_s == simulate(plan, COST).step_s
    assert sum(summary.packs_by_cp_size.values()) == len(list(plan.packs()))
    assert list(summary.packs_by_cp_size) == sorted(summary.packs_by_cp_size)
    assert 0 < summary.fill <= 1
    assert summary.tokens_per_rank_min <= summary.tokens / plan.ranks <= summary.tokens_per_rank_max + 1e-9
    shares = sum(-plan.lengths[s] % (2 * p.cp_size) for p in plan.packs() for s in p.samples if p.cp_size > 1)
    assert summary.padding_to_multiples == shares


def test_the_mean_of_one_summary_is_that_summary():
    summary = summarize(PLAN, COST, lower_bound_s=100.0)
    assert mean_summary([summary]) == summary


def test_a_mean_weighs_busy_shares_by_time_and_counts_sizes_that_are_not_in_all_plans():
    first = summarize(PLAN, COST, lower_bound_s=100.0, planning_s=1.0)
    single = StepPlan(4, 100, (400,), ((Pack(0, 4, (0,)),),))
    second = summarize(single, COST, lower_bound_s=110.0, planning_s=3.0)
    mean = mean_summary([first, second])
    assert mean.predicted_step_s == (120.5 + 110) / 2
    assert mean.share_of_lower_bound == pytest.approx((100 + 110) / (120.5 + 110))
    assert mean.busy_share == pytest.approx((first.busy_share * 120.5 + 110) / (120.5 + 110))
    assert mean.packs_by_cp_size == {1: 1, 2: 1, 4: 0.5}
    assert mean.planning_s == 2.0
    assert mean.tokens == (331 + 400) / 2


def test_the_mean_of_nothing_is_refused():
    with pytest.raises(PlanError, match="no plans"):
        mean_summary([])


def test_a_summary_as_json_holds_its_shares():
    values = json.loads(json.dumps(summarize(PLAN, COST, lower_bound_s=100.0).to_dict()))
    assert values["packs_by_cp_size"] == {"1": 2, "2": 2}
    assert math.isclose(values["share_of_lower_bound"], 100 / 120.5)
    assert {"padding_share", "fill", "busy_share", "planning_s"} <= values.keys()
