"""The same lengths give the same plan: again, in another process, from a copy, at another scale of costs."""

import json
import pickle
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dcp.errors import PlanError
from lightning_dcp.schedule import CostModel, DynamicScheduler, StaticScheduler, preset
from tests.schedule.plans import in_two_processes, lognormal_lengths, schedulers

quickly = settings(max_examples=60, deadline=None)
H100 = preset("h100")


@given(schedulers(most=60))
@quickly
def test_the_same_lengths_give_the_same_plan(case):
    scheduler, lengths = case
    try:
        first = scheduler.schedule(lengths)
    except PlanError:
        return
    for other in (scheduler, replace(scheduler), pickle.loads(pickle.dumps(scheduler))):
        for same in (tuple(lengths), np.array(lengths)):
            again = other.schedule(same)
            assert again == first
            assert again.digest() == first.digest()
            assert again.extra == first.extra


@pytest.mark.parametrize(
    "scheduler",
    [DynamicScheduler(2, 10), DynamicScheduler(2, 10, mode="lockstep"), StaticScheduler(2, 10, 1)],
    ids=["free", "lockstep", "static"],
)
def test_plans_of_arrays_of_lengths_can_be_written_as_json(scheduler):
    lengths = [3, 9, 4]
    written = json.dumps(scheduler.schedule(np.array(lengths, dtype=np.int32)).to_json())
    assert written == json.dumps(scheduler.schedule(lengths).to_json())


def test_the_order_in_which_a_cost_model_is_written_does_not_matter():
    values = H100.to_dict()
    turned = CostModel.from_dict({name: values[name] for name in reversed(values)})
    lengths = lognormal_lengths(0, 64, 5.9, 1.3, 65536)
    plans = [DynamicScheduler(8, 8192, cost).schedule(lengths) for cost in (H100, turned)]
    assert plans[0] == plans[1]
    assert plans[0].extra == plans[1].extra


def test_processes_agree_on_the_plan():
    program = (
        "from lightning_dcp.schedule import DynamicScheduler\n"
        "lengths = [(7 * i * i) % 5001 + 1 for i in range(60)]\n"
        "more = dict(ranks_per_node=4, rank_speeds=(1.0, 0.5) * 6)\n"
        "made = [DynamicScheduler(12, 640, mode=m, **o) for m in ('free', 'lockstep') for o in ({}, more)]\n"
        "print(*(s.schedule(lengths).digest() for s in made))"
    )
    first, second = in_two_processes(program)
    assert first == second
    assert len(set(first)) == 4


@given(schedulers(), st.integers(-20, 20))
@quickly
def test_only_the_ratio_of_costs_matters(case, doublings):
    scheduler, lengths = case
    cost, scale = scheduler.cost, 2.0**doublings
    seconds = ("linear", "attention", "pack_overhead", "hop_latency", "internode_latency")
    speeds = ("bandwidth", "internode_bandwidth")
    values = {name: value for name, value in vars(cost).items() if value is not None}
    scaled = {name: values[name] * scale for name in seconds if name in values}
    scaled |= {name: values[name] / scale for name in speeds if name in values}
    try:
        plan = scheduler.schedule(lengths)
    except PlanError:
        return
    other = replace(scheduler, cost=replace(cost, **scaled)).schedule(lengths)
    assert other == plan
    assert other.extra["predicted_step_s"] == plan.extra["predicted_step_s"] * scale
