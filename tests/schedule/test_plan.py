import json
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lightning_dcp.errors import PlanError
from lightning_dcp.schedule import Pack, StepPlan
from lightning_dcp.schedule.plan import divisors, in_rounds
from tests.schedule.plans import in_two_processes, plans, sizes_of, walk

given_plan = settings(max_examples=60, deadline=None)


def changed(plan, round_, place, **changes):
    """The plan with one pack changed."""
    rounds = [list(microbatch) for microbatch in plan.microbatches]
    rounds[round_][place] = replace(rounds[round_][place], **changes)
    return replace(plan, microbatches=tuple(map(tuple, rounds)))


@st.composite
def places(draw, plan):
    round_ = draw(st.integers(0, len(plan.microbatches) - 1))
    return round_, draw(st.integers(0, len(plan.microbatches[round_]) - 1))


def refused(plan, message):
    with pytest.raises(PlanError, match=message):
        plan.validate()


@given(plans())
@given_plan
def test_valid_plans_pass_and_finish(plan):
    plan.validate()
    assert walk(plan) == {}


@given(plans(), st.data())
@given_plan
def test_a_sample_left_out_is_found(plan, data):
    round_, place = data.draw(places(plan))
    samples = plan.microbatches[round_][place].samples
    assume(len(samples) > 1)
    lost = data.draw(st.sampled_from(samples))
    left = tuple(s for s in samples if s != lost)
    refused(changed(plan, round_, place, samples=left), rf"exactly once; not so for sample\(s\) \[{lost}\]")


def test_a_pack_left_out_is_found():
    plan = StepPlan(2, 9, (3, 4), ((Pack(0, 1, (0,)),),))
    refused(plan, r"exactly once; not so for sample\(s\) \[1\]")


@given(plans(mode="free"), st.data())
@given_plan
def test_a_sample_planned_twice_is_found(plan, data):
    sample = data.draw(st.integers(0, len(plan.lengths) - 1))
    extra = Pack(0, plan.ranks, (sample,))
    plan = replace(plan, microbatches=(*plan.microbatches, (extra,)))
    refused(plan, rf"exactly once; not so for sample\(s\) \[{sample}\]")


@given(plans(), st.data(), st.sampled_from(["unsorted", "twice", "none", "unknown", "negative"]))
@given_plan
def test_wrong_samples_of_a_pack_are_found(plan, data, fault):
    round_, place = data.draw(places(plan))
    samples = plan.microbatches[round_][place].samples
    assume(fault != "unsorted" or len(samples) > 1)
    wrong = {
        "unsorted": samples[::-1],
        "twice": (samples[0], *samples),
        "none": (),
        "unknown": (*samples, len(plan.lengths)),
        "negative": (-1, *samples),
    }[fault]
    message = "once and ascending" if fault in ("unsorted", "twice", "none") else r"the batch has samples 0\.\."
    refused(changed(plan, round_, place, samples=wrong), message)


@given(plans(), st.data())
@given_plan
def test_a_size_that_does_not_divide_the_plane_is_found(plan, data):
    round_, place = data.draw(places(plan))
    size = data.draw(st.integers(-1, 2 * plan.ranks).filter(lambda c: c not in sizes_of(plan.ranks)))
    refused(changed(plan, round_, place, cp_size=size), f"cp_size {size} does not divide the plane of {plan.ranks}")


@given(plans(), st.data())
@given_plan
def test_a_group_off_its_grid_is_found(plan, data):
    round_, place = data.draw(places(plan))
    c = plan.microbatches[round_][place].cp_size
    allowed = range(0, plan.ranks, c)
    first = data.draw(st.integers(-plan.ranks, 2 * plan.ranks).filter(lambda f: f not in allowed))
    refused(changed(plan, round_, place, first_rank=first), f"a group of {c} must start at a multiple of {c}")


@given(plans(), st.data())
@given_plan
def test_a_pack_over_the_token_limit_is_found(plan, data):
    worst = max(-(-p.tokens(plan.lengths) // p.cp_size) for p in plan.packs())
    assert plan.max_seqlen_per_dp_cp_rank == worst
    refused(replace(plan, max_seqlen_per_dp_cp_rank=worst - 1), f"exceed max_seqlen_per_dp_cp_rank={worst - 1}")


def test_the_limit_is_tokens_a_rank():
    StepPlan(4, 4, (16,), ((Pack(0, 4, (0,)),),)).validate()
    refused(StepPlan(4, 4, (17,), ((Pack(0, 4, (0,)),),)), r"17 tokens on 4 rank\(s\)")


@given(plans(mode="free"), st.data())
@given_plan
def test_two_packs_of_a_rank_in_one_micro_batch_are_found(plan, data):
    round_ = data.draw(st.integers(0, len(plan.microbatches) - 1))
    number = len(plan.lengths)
    rounds = list(plan.microbatches)
    rounds[round_] = (*rounds[round_], Pack(0, plan.ranks, (number,)))
    plan = replace(plan, lengths=(*plan.lengths, 1), microbatches=tuple(rounds))
    refused(plan, f"micro-batch {round_}: a rank has more than one pack")


@given(plans(mode="free"))
@given_plan
def test_idle_ranks_are_found_in_lock_step_only(plan):
    idle = [
        (number, sorted(set(range(plan.ranks)) - {rank for pack in microbatch for rank in pack.ranks}))
        for number, microbatch in enumerate(plan.microbatches)
    ]
    number, ranks = next(((n, r) for n, r in idle if r), (None, None))
    if number is None:
        replace(plan, mode="lockstep").validate()
    else:
        refused(
            replace(plan, mode="lockstep"), rf"micro-batch {number}: rank\(s\) {ranks} have no pack".replace("[", r"\[")
        )


def test_an_unknown_mode_is_found():
    plan = StepPlan(1, 4, (4,), ((Pack(0, 1, (0,)),),))
    refused(replace(plan, mode="lock-step"), "unknown mode 'lock-step'")
    with pytest.raises(PlanError, match="unknown mode"):
        StepPlan.from_json(plan.to_json() | {"mode": "lock-step"})


def test_packs_of_a_rank_come_in_order():
    plan = StepPlan(
        4, 9, (1, 2, 3, 4), ((Pack(0, 1, (0,)), Pack(2, 2, (1,))), (Pack(0, 4, (2,)),), (Pack(2, 1, (3,)),))
    )
    plan.validate()
    assert [p.samples for p in plan.packs()] == [(0,), (1,), (2,), (3,)]
    assert {rank: [p.samples[0] for p in plan.packs_of(rank)] for rank in range(4)} == {
        0: [0, 2],
        1: [2],
        2: [1, 2, 3],
        3: [1, 2],
    }
    assert list(plan.microbatches[0][1].ranks) == [2, 3]
    assert plan.microbatches[0][1].tokens(plan.lengths) == 2


# ------------------------------------------------------------------ JSON


@given(plans(), st.dictionaries(st.text(max_size=5).map("x_{}".format), st.integers(), max_size=3))
@given_plan
def test_json_gives_the_plan_back(plan, extra):
    plan = replace(plan, extra=extra)
    back = StepPlan.from_json(json.loads(json.dumps(plan.to_json())))
    assert back == plan
    assert back.extra == plan.extra
    assert back.digest() == plan.digest()


def test_json_of_a_plan():
    data = {
        "ranks": 8,
        "max_seqlen_per_dp_cp_rank": 4096,
        "mode": "free",
        "lengths": [16000, 500],
        "microbatches": [
            [
                {"first_rank": 0, "cp_size": 4, "samples": [0], "layout": "zigzag"},
                {"first_rank": 4, "cp_size": 1, "samples": [1], "layout": "zigzag"},
            ]
        ],
        "predicted_step_s": 0.42,
    }
    plan = StepPlan.from_json(data)
    assert plan == StepPlan(8, 4096, (16000, 500), ((Pack(0, 4, (0,)), Pack(4, 1, (1,))),))
    assert plan.extra == {"predicted_step_s": 0.42}
    assert plan.to_json() == data


def test_what_is_read_is_validated():
    data = StepPlan(2, 4, (4,), ((Pack(0, 1, (0,)),),)).to_json()
    with pytest.raises(PlanError, match="exceed"):
        StepPlan.from_json(data | {"max_seqlen_per_dp_cp_rank": 3})


# ------------------------------------------------------------------ digest


PLAN = StepPlan(4, 10, (5, 6, 7), ((Pack(0, 1, (0,)), Pack(2, 2, (1,))), (Pack(0, 4, (2,)),)))
OTHER_PLANS = {
    "another group": changed(PLAN, 0, 0, first_rank=1),
    "another size": changed(PLAN, 1, 0, cp_size=2),
    "another layout": changed(PLAN, 1, 0, layout="contiguous"),
    "other samples": changed(changed(PLAN, 0, 0, samples=(1,)), 0, 1, samples=(0,)),
    "another order of micro-batches": replace(PLAN, microbatches=PLAN.microbatches[::-1]),
    "other rounds": replace(PLAN, microbatches=tuple((pack,) for pack in PLAN.packs())),
    "another length": replace(PLAN, lengths=(5, 6, 8)),
    "another limit": replace(PLAN, max_seqlen_per_dp_cp_rank=11),
    "another mode": replace(PLAN, mode="lockstep"),
    "another plane": replace(PLAN, ranks=8),
}


@pytest.mark.parametrize("other", OTHER_PLANS.values(), ids=OTHER_PLANS.keys())
def test_digests_of_different_plans_differ(other):
    assert other.digest() != PLAN.digest()


def test_all_those_digests_differ_from_each_other():
    assert len({plan.digest() for plan in OTHER_PLANS.values()}) == len(OTHER_PLANS)


@given(plans())
@given_plan
def test_equal_plans_have_equal_digests_of_63_bits(plan):
    copy = StepPlan.from_json(json.loads(json.dumps(plan.to_json())))
    assert copy is not plan
    assert copy.digest() == plan.digest()
    assert 0 <= plan.digest() < 2**63


@pytest.mark.parametrize("extra", [{"cost_model": {"linear": 1.0}}, {"b": 1, "a": 2}, {"lengths": 3, "ranks": None}])
def test_what_is_only_reported_does_not_change_the_plan(extra):
    plan = replace(PLAN, extra=extra)
    assert plan.digest() == PLAN.digest()
    assert StepPlan.from_json(plan.to_json()) == PLAN


def test_the_order_of_keys_does_not_change_the_digest():
    data = PLAN.to_json()
    turned = {key: data[key] for key in reversed(data)}
    turned["microbatches"] = [[dict(reversed(pack.items())) for pack in m] for m in turned["microbatches"]]
    assert StepPlan.from_json(turned).digest() == PLAN.digest()


def test_the_digest_is_the_same_in_every_process():
    program = (
        "import sys, json; from lightning_dcp.schedule.plan import StepPlan; "
        "print(StepPlan.from_json(json.loads(sys.argv[1])).digest())"
    )
    assert in_two_processes(program, json.dumps(PLAN.to_json())) == [[str(PLAN.digest())]] * 2


# ------------------------------------------------------------------ sizes and rounds


@pytest.mark.parametrize(("ranks", "sizes"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 3, 6]), (8, [1, 2, 4, 8])])
def test_sizes_offered_are_the_divisors_of_the_plane(ranks, sizes):
    assert list(divisors(ranks)) == sizes


@given(st.sampled_from([1, 2, 4, 6, 8, 12]), st.data())
@given_plan
def test_rounds_keep_each_ranks_order_and_are_as_few_as_can_be(ranks, data):
    groups = data.draw(
        st.lists(
            st.sampled_from(sizes_of(ranks)).flatmap(
                lambda c: st.integers(0, ranks // c - 1).map(lambda place: (place * c, c))
            ),
            min_size=1,
            max_size=12,
        )
    )
    packs = [Pack(first, c, (number,)) for number, (first, c) in enumerate(groups)]
    rounds = in_rounds(packs, ranks)
    plan = StepPlan(ranks, 1, (1,) * len(packs), rounds)
    plan.validate()
    for rank in range(ranks):
        assert plan.packs_of(rank) == [pack for pack in packs if rank in pack.ranks]
    chain = {}  # the longest chain of packs that must follow one another, ending in each pack
    for pack in packs:
        chain[pack] = 1 + max((chain[p] for p in chain if set(p.ranks) & set(pack.ranks)), default=0)
    assert len(rounds) == max(chain.values())
