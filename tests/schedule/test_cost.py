"""The formula of the cost model, against numbers by hand and against a plain loop."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dcp.errors import ConfigurationError
from lightning_dcp.schedule import CostModel
from tests.schedule.oracles import pack_seconds
from tests.schedule.plans import cost_models

quickly = settings(max_examples=60, deadline=None)
lengths_of_a_pack = st.lists(st.integers(1, 200_000), min_size=1, max_size=6)

HALVES = ((100, 0.25), (200, 0.5), (400, 1.0))


# ------------------------------------------------------------------ by hand


def test_linear_work_and_overhead_are_shared_out_as_documented():
    cost = CostModel(linear=2.0, attention=0.0, pack_overhead=5.0)
    assert cost.pack_seconds([10]) == 25.0
    assert cost.pack_seconds([10, 6]) == 37.0
    assert cost.pack_seconds([10, 6], 4) == 13.0


def test_attention_grows_with_the_square_of_each_sample_alone():
    cost = CostModel(linear=0.0, attention=3.0)
    assert cost.pack_seconds([10]) == 300.0
    assert cost.pack_seconds([10, 4], 2) == (300.0 + 48.0) / 2


@pytest.mark.parametrize(
    ("tokens", "share"), [(1, 0.25), (100, 0.25), (150, 0.375), (200, 0.5), (250, 0.625), (400, 1.0), (9000, 1.0)]
)
def test_efficiency_is_linear_between_points_and_constant_beyond_them(tokens, share):
    cost = CostModel(linear=0.0, attention=1.0, efficiency=HALVES)
    assert cost.pack_seconds([tokens]) == tokens**2 / share
    assert cost.pack_seconds([4 * tokens], 4) == (4 * tokens) ** 2 / 4 / share


def test_the_efficiency_is_that_of_a_samples_own_shard():
    """Two samples of 400 tokens on two ranks run at half the speed, though the pack has 400 tokens a rank."""
    cost = CostModel(linear=1.0, attention=1.0, efficiency=HALVES)
    assert cost.pack_seconds([400, 400], 2) == 400 + 2 * 400**2 / (2 * 0.5)


def test_one_point_is_the_efficiency_of_all_lengths():
    cost = CostModel(linear=0.0, attention=1.0, efficiency=((50, 0.5),))
    assert [cost.pack_seconds([n]) for n in (1, 50, 70)] == [2.0, 5000.0, 9800.0]


def test_hops_cost_latency_and_transfer_and_none_on_one_rank():
    cost = CostModel(linear=1.0, attention=0.0, hop_latency=3.0, hop_bytes=8.0, bandwidth=2.0)
    assert cost.pack_seconds([40]) == 40.0
    assert cost.pack_seconds([30, 10], 4) == 10 + 3 * (3.0 + 8.0 * 10 / 2.0)


def test_attention_hides_transfers_as_far_as_they_overlap():
    cost = CostModel(linear=0.0, attention=1.0, hop_latency=100.0, overlap=0.5)
    # two ranks: 20^2 / 2 = 200 s of attention, 100 s of it in each of two steps, half of which hides the hop
    assert cost.pack_seconds([20], 2) == 200 + (100 - 0.5 * 100)
    assert cost.pack_seconds([40], 2) == 800  # 200 s would hide 100
    assert cost.pack_seconds([20, 20], 2) == 400  # both samples hide one hop


def test_groups_that_span_nodes_pay_for_the_slow_links():
    cost = CostModel(
        linear=0.0,
        attention=1e-30,
        hop_latency=1.0,
        hop_bytes=4.0,
        bandwidth=2.0,
        internode_latency=10.0,
        internode_bandwidth=0.5,
        ranks_per_node=4,
    )
    inside, across = 3 * (1 + 4.0 * 5 / 2), 7 * (10 + 4.0 * 5 / 0.5)
    assert cost.pack_seconds([20], 4) == pytest.approx(inside)
    assert cost.pack_seconds([20], 4, first_rank=4) == pytest.approx(inside)
    assert cost.pack_seconds([40], 8) == pytest.approx(across)
    uneven = replace(cost, ranks_per_node=3)
    spans = [uneven.spans_nodes(first, 2) for first in (0, 2, 4, 6)]
    assert spans == [False, True, False, False]
    assert uneven.pack_seconds([10], 2, first_rank=2) == pytest.approx(10 + 4.0 * 5 / 0.5)
    assert uneven.pack_seconds([10], 2, first_rank=0) == pytest.approx(1 + 4.0 * 5 / 2)
    assert not replace(cost, ranks_per_node=None).spans_nodes(0, 1024)


# ------------------------------------------------------------------ for all models


@given(cost_models(), lengths_of_a_pack, st.integers(1, 64), st.integers(0, 5))
@quickly
def test_packs_cost_what_the_formula_says(cost, lengths, c, place):
    expected = pack_seconds(cost, lengths, c, place * c)
    assert cost.pack_seconds(lengths, c, place * c) == pytest.approx(expected, rel=1e-12)


@given(cost_models(), lengths_of_a_pack, st.integers(1, 64), st.booleans())
@quickly
def test_a_sample_alone_costs_as_much_as_a_pack_of_it(cost, lengths, c, spans_nodes):
    cost = replace(cost, ranks_per_node=1 if spans_nodes and c > 1 else None)
    alone = cost.sample_seconds(lengths, c, spans_nodes=spans_nodes and c > 1)
    assert alone.tolist() == pytest.approx([cost.pack_seconds([n], c) for n in lengths], rel=1e-12)


@given(cost_models(), lengths_of_a_pack, st.integers(1, 200_000), st.integers(1, 64))
@quickly
def test_one_more_sample_never_makes_a_pack_shorter(cost, lengths, more, c):
    shorter, longer = cost.pack_seconds(lengths, c), cost.pack_seconds([*lengths, more], c)
    assert longer >= shorter * (1 - 1e-12)


@given(cost_models(), lengths_of_a_pack, st.integers(1, 64))
@quickly
def test_two_packs_cost_at_least_their_samples_in_one(cost, lengths, c):
    """A pack's overhead and latency are paid once, and one sample's attention hides another's transfers."""
    apart = sum(cost.pack_seconds([n], c) for n in lengths)
    assert cost.pack_seconds(lengths, c) <= apart * (1 + 1e-12)


@given(cost_models(), lengths_of_a_pack, st.sampled_from([1, 2, 3, 8]))
@quickly
def test_lengths_may_be_arrays_and_their_order_does_not_matter(cost, lengths, c):
    expected = cost.pack_seconds(lengths, c)
    assert cost.pack_seconds(np.array(lengths), c) == pytest.approx(expected, rel=1e-12)
    assert cost.pack_seconds(lengths[::-1], c) == pytest.approx(expected, rel=1e-12)
    assert cost.attention_seconds(np.array(lengths), c).tolist() == cost.attention_seconds(lengths, c).tolist()


# ------------------------------------------------------------------ as data


@given(cost_models())
@quickly
def test_a_model_comes_back_from_json_as_it_was(cost):
    back = CostModel.from_dict(json.loads(json.dumps(cost.to_dict())))
    assert back == cost
    assert hash(back) == hash(cost)


def test_what_is_left_out_is_not_counted():
    assert CostModel.from_dict({"linear": 1, "attention": 0}) == CostModel(1, 0)
    assert CostModel(1, 0).pack_seconds([100, 50], 5) == 30.0


def test_lists_in_the_efficiency_become_tuples():
    cost = CostModel.from_dict({"linear": 1, "attention": 1, "efficiency": [[1.0, 1], [20, 0.5]]})
    assert cost.efficiency == ((1, 1.0), (20, 0.5))
    assert {type(tokens) for tokens, _ in cost.efficiency} == {int}


# ------------------------------------------------------------------ what is refused

NUMBERS = ["linear", "attention", "pack_overhead", "hop_latency", "hop_bytes", "internode_latency"]
OPTIONAL = ["bandwidth", "internode_latency", "internode_bandwidth"]
NOT_NUMBERS = [float("nan"), float("inf"), -1e-9, "fast", None, True, {"a": 1.0}]
NO_QUANTITIES = [
    (name, value)
    for name in [*NUMBERS, "bandwidth", "internode_bandwidth", "overlap"]
    for value in NOT_NUMBERS
    if not (value is None and name in OPTIONAL)
]


@pytest.mark.parametrize(("name", "value"), NO_QUANTITIES, ids=repr)
def test_values_that_are_no_quantities_are_refused_by_name(name, value):
    for make in (lambda values: CostModel(**values), CostModel.from_dict):
        with pytest.raises(ConfigurationError) as caught:
            make({"linear": 1.0, "attention": 1.0} | {name: value})
        assert len(caught.value.problems) == 1
        assert caught.value.problems[0].asked.startswith(f"{name}={value!r}")


def test_bytes_without_a_bandwidth_are_refused():
    with pytest.raises(ConfigurationError, match="bandwidth=None"):
        CostModel(1.0, 1.0, hop_bytes=1e5)


def test_hops_between_nodes_are_like_those_inside_one_unless_told():
    inside = CostModel(1.0, 1e-3, hop_latency=3.0, hop_bytes=8.0, bandwidth=2.0)
    across = CostModel(1.0, 1e-3, hop_latency=3.0, hop_bytes=8.0, bandwidth=2.0, ranks_per_node=1)
    slower = CostModel(
        1.0, 1e-3, hop_latency=3.0, hop_bytes=8.0, bandwidth=2.0, ranks_per_node=1, internode_bandwidth=1.0
    )
    assert inside.pack_seconds([40], 2) == across.pack_seconds([40], 2) == 20 + 0.8 + 3 + 80
    assert slower.pack_seconds([40], 2) == 20 + 0.8 + 3 + 160


def test_hops_are_free_unless_told():
    assert CostModel(1.0, 0.0).pack_seconds([40], 4) == 10.0


def test_integers_beyond_all_floats_are_refused():
    with pytest.raises(ConfigurationError, match="linear=1000"):
        CostModel(linear=10**400, attention=0.0)


@pytest.mark.parametrize(
    ("name", "value"),
    [("bandwidth", 0), ("internode_bandwidth", 0.0), ("overlap", 1.01)]
    + [("ranks_per_node", value) for value in (0, -8, 8.0, True, "8")],
)
def test_values_out_of_their_range_are_refused_by_name(name, value):
    with pytest.raises(ConfigurationError) as caught:
        CostModel(**{"linear": 1.0, "attention": 1.0, name: value})
    assert [problem.asked for problem in caught.value.problems] == [f"{name}={value!r}"]


@pytest.mark.parametrize(
    "table",
    [
        (),
        ((200, 0.5), (100, 1.0)),
        ((100, 0.5), (100, 1.0)),
        ((0, 0.5),),
        ((-5, 0.5), (100, 1.0)),
        ((100.5, 1.0),),
        ((100, 0.0),),
        ((100, 1.2),),
        ((100, float("nan")),),
        ((float("inf"), 1.0),),
        ((100, True),),
        ((100,),),
        ((100, 0.5, 1.0),),
        (100, 0.5),
        (("100", 1.0),),
        {100: 1.0},
        0.8,
        None,
    ],
)
def test_efficiencies_that_are_no_table_are_refused(table):
    with pytest.raises(ConfigurationError, match=r"efficiency=.*\n.*tokens ascending, shares above 0 and at most 1"):
        CostModel(1.0, 1.0, efficiency=table)


def test_work_that_costs_nothing_is_refused():
    with pytest.raises(ConfigurationError, match="work costs nothing"):
        CostModel(0.0, 0.0, pack_overhead=1.0)


def test_all_that_is_wrong_is_told_at_once():
    with pytest.raises(ConfigurationError) as caught:
        CostModel(-1.0, float("nan"), efficiency=(), bandwidth=0.0, overlap=2.0, ranks_per_node=0)
    found = {problem.asked.partition("=")[0] for problem in caught.value.problems}
    assert found == {"linear", "attention", "efficiency", "bandwidth", "overlap", "ranks_per_node"}
    assert all(problem.found and problem.remedy for problem in caught.value.problems)
