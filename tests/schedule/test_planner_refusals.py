"""What the planner refuses: samples that fit nowhere, lengths that are none, options that contradict."""

from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dcp.errors import ConfigurationError, PlanError, SampleTooLongError
from lightning_dcp.schedule import DynamicScheduler, StaticScheduler
from tests.schedule.plans import limited_sizes, schedulers

SCHEDULERS = pytest.mark.parametrize(
    "scheduler",
    [DynamicScheduler(4, 10), DynamicScheduler(4, 10, mode="lockstep"), StaticScheduler(8, 10, 4)],
    ids=["free", "lockstep", "static"],
)


@SCHEDULERS
def test_a_sample_too_long_for_the_largest_group_is_named(scheduler):
    scheduler.schedule([3, 40])
    with pytest.raises(SampleTooLongError) as caught:
        scheduler.schedule([3, 40, 41, 99])
    error = caught.value
    assert (error.sample, error.length, error.ranks, error.max_seqlen_per_dp_cp_rank) == (2, 41, 4, 10)
    assert str(error).startswith(
        "sample 2 of the batch has 41 tokens; at max_seqlen_per_dp_cp_rank=10 it would need 5 ranks, and the largest "
        "context-parallel group has 4. The largest length that fits is 40:"
    )
    assert "sample 2 of the batch (id 777) has 41 tokens" in str(error.named(777))


@given(schedulers(), st.data())
@settings(max_examples=60, deadline=None)
def test_a_sample_is_too_long_only_if_no_group_holds_it(case, data):
    scheduler, lengths = case
    capacity = scheduler.sizes[-1] * scheduler.max_seqlen_per_dp_cp_rank
    if scheduler.cost.ranks_per_node is None:
        assert scheduler.sizes[-1] == limited_sizes(scheduler)[-1]
    place = data.draw(st.integers(0, len(lengths)))
    longer = data.draw(st.integers(capacity + 1, 2 * capacity + 1))
    with pytest.raises(SampleTooLongError, match=f"sample {place} of the batch has {longer} tokens"):
        scheduler.schedule([*lengths[:place], longer, *lengths[place:]])


@SCHEDULERS
@pytest.mark.parametrize(
    ("lengths", "words"),
    [
        ([], "empty batch"),
        (np.array([], dtype=int), "empty batch"),
        ([3, 0, 2], "sample 1 has 0 tokens"),
        ([3, -3, 2], "sample 1 has -3 tokens"),
        ([3, 2.5], "sample 1 has length 2.5"),
        ([3, 2.0], "sample 1 has length 2.0"),
        ([3, float("nan")], "sample 1 has length nan"),
        ([3, float("inf")], "sample 1 has length inf"),
        ([True, True], "True"),
        ([3, True], "sample 1 has length True"),
        ([3, "7"], "sample 1 has length '7'"),
        ([3, None], "sample 1 has length None"),
        ([[3, 2], [1, 1]], "one a sample"),
        ([[3, 2], [1]], "one a sample"),
        (np.ones((2, 2), dtype=int), "one a sample"),
        (np.array([1.0, 2.0]), "sample 0 has length"),
        (np.array([True]), "whole numbers"),
        (7, "whole numbers"),
        ("7", "whole numbers"),
        ([10**30, 3], "1000000"),
    ],
)
def test_lengths_that_are_none_are_refused(scheduler, lengths, words):
    with pytest.raises(PlanError, match=words):
        scheduler.schedule(lengths)


@pytest.mark.parametrize("name", ["ranks", "max_seqlen_per_dp_cp_rank", "microbatch_multiple", "ranks_per_node"])
@pytest.mark.parametrize("value", [0, -1, 2.5, "4", True])
def test_counts_that_are_no_positive_whole_numbers_are_refused(name, value):
    arguments = {"ranks": 4, "max_seqlen_per_dp_cp_rank": 10, "mode": "lockstep"} | {name: value}
    with pytest.raises(ConfigurationError) as caught:
        DynamicScheduler(**arguments)
    assert [problem.asked for problem in caught.value.problems] == [f"{name}={value!r}"]


@pytest.mark.parametrize(
    "speeds",
    [
        (1.0,) * 3,
        (1.0,) * 5,
        (),
        (1.0, 1.0, 0.0, 1.0),
        (1.0, -1.0, 1.0, 1.0),
        (1.0, float("nan"), 1.0, 1.0),
        (float("inf"), 1.0, 1.0, 1.0),
        (True, 1.0, 1.0, 1.0),
        ("1", 1.0, 1.0, 1.0),
        (None, 1, 1, 1),
        1.0,
        "fast",
        pytest.param((10**400, 1, 1, 1), id="too large for a float"),
    ],
    ids=repr,
)
def test_speeds_that_are_not_one_positive_number_a_rank_are_refused(speeds):
    with pytest.raises(ConfigurationError, match=r"rank_speeds=(.|\n)*each of 4 ranks"):
        DynamicScheduler(4, 10, rank_speeds=speeds)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mode": "lock-step"}, "'lock-step'.*\n.*unknown mode"),
        ({"mode": None}, "None"),
        ({"microbatch_multiple": 2}, "microbatch_multiple=2.*\n.*free-running"),
        ({"min_context_parallel_size": 3}, "min_context_parallel_size=3"),
        ({"max_context_parallel_size": 8}, "max_context_parallel_size=8"),
        ({"min_context_parallel_size": 4, "max_context_parallel_size": 2}, "above the largest"),
    ],
)
def test_a_bad_option_is_one_problem(options, words):
    with pytest.raises(ConfigurationError, match=words) as caught:
        DynamicScheduler(4, 10, **options)
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize("cost", ["h100", {"linear": 1.0, "attention": 0.0}, None, 1.0], ids=repr)
def test_a_cost_that_is_no_model_is_refused(cost):
    with pytest.raises(ConfigurationError, match="cost="):
        DynamicScheduler(4, 10, cost)


def test_all_bad_options_are_told_at_once():
    with pytest.raises(ConfigurationError) as caught:
        DynamicScheduler(
            4,
            0,
            mode="lock-step",
            min_context_parallel_size=3,
            max_context_parallel_size=5,
            ranks_per_node=0,
            microbatch_multiple=0,
            rank_speeds=(1.0,),
            alignment="fp8",
        )
    text = str(caught.value)
    names = {field.name for field in fields(DynamicScheduler)} - {"ranks", "cost", "layout"}
    assert [name for name in sorted(names) if f"{name}=" not in text] == []
    assert len(caught.value.problems) == len(names)
