"""Padding that a back end needs, in plans: rules of Transformer Engine and FP8, and token limits that count it."""

import math
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lightning_dcp.errors import ConfigurationError, PlanError, SampleTooLongError
from lightning_dcp.schedule import (
    Alignment,
    DynamicScheduler,
    MegatronScheduler,
    Pack,
    StaticScheduler,
    StepPlan,
    simulate,
    summarize,
)
from lightning_dcp.schedule.alignment import NO_ALIGNMENT
from tests.schedule.oracles import sizes_of, walk
from tests.schedule.plans import schedulers

quickly = settings(max_examples=60, deadline=None)
sizes, tensor_parallel = st.integers(1, 12), st.sampled_from([1, 2, 3, 4, 8])
lengths_of_pack = st.lists(st.integers(1, 5000), min_size=1, max_size=6)


def up(tokens, multiple):
    return math.ceil(tokens / multiple) * multiple


# ------------------------------------------------------------------ the rules


@given(lengths_of_pack, sizes, tensor_parallel)
def test_fp8_pads_each_sample_and_the_pack(lengths, c, tp):
    padded = Alignment.fp8(tp).padded_lengths(lengths, c)
    of_sample, of_pack = math.lcm(16, 2 * c * tp), 128 * 2 * c * tp
    assert [n % of_sample for n in padded] == [0] * len(lengths)
    assert sum(padded) % of_pack == 0
    assert sum(padded) % (128 * c * tp) == 0  # each rank's part of a pack, and each tensor-parallel part of it
    assert padded[:-1] == tuple(up(n, of_sample) for n in lengths[:-1])
    alone = sum(up(n, of_sample) for n in lengths)
    assert sum(padded) == up(alone, math.lcm(of_pack, of_sample))  # no more than needed


@given(lengths_of_pack, sizes, tensor_parallel)
def test_transformer_engine_pads_cut_samples_only(lengths, c, parts):
    padded = Alignment.transformer_engine(parts).padded_lengths(lengths, c)
    assert padded == tuple(lengths if c == 1 else (up(n, 2 * c * parts) for n in lengths))


def test_rules_by_hand():
    assert Alignment.fp8(2).padded_lengths([5, 100], 4) == (16, 2032)  # 16 + 112 up to 128 x 16
    assert Alignment.fp8().padded_lengths([300], 1) == (512,)
    assert Alignment.transformer_engine().padded_lengths([7, 5, 1, 13], 2) == (8, 8, 4, 16)
    assert Alignment.transformer_engine(2).padded_lengths([7, 17], 2) == (8, 24)
    assert NO_ALIGNMENT.padded_lengths([7, 5], 4) == (7, 5)


def test_joined_alignments_keep_the_rules_of_both():
    both = Alignment.transformer_engine(3).joined(Alignment.fp8())
    assert both == Alignment(16, 6, 256)
    assert both.joined(NO_ALIGNMENT) == NO_ALIGNMENT.joined(both) == both
    assert not NO_ALIGNMENT and both


@pytest.mark.parametrize("values", [(0, 0, 1), (1, -1, 1), (1, 0, 0), (1.0, 0, 1), (True, 0, 1)])
def test_values_that_are_no_multiples_are_refused(values):
    with pytest.raises(PlanError, match="no multiples"):
        Alignment(*values)


# ------------------------------------------------------------------ planners


@st.composite
def alignments(draw):
    tp = draw(st.sampled_from([1, 2, 4]))
    return draw(st.sampled_from([Alignment.fp8(tp), Alignment.transformer_engine(tp), Alignment(sample=24, cut=2)]))


@st.composite
def cases(draw, **fixed):
    """A scheduler for some alignment, and lengths that fit: short ones and any others."""
    alignment = draw(alignments())
    limit = 2048 * draw(st.integers(1, 3)) + draw(st.sampled_from([0, 0, 100]))
    scheduler, shares = draw(schedulers((1, 2, 3, 4, 6, 8), most=25, max_seqlen_per_dp_cp_rank=limit, **fixed))
    longest = scheduler.sizes[-1] * alignment.limit(limit)
    return replace(scheduler, alignment=alignment), [min(length, longest) for length in shares]


def check(plan, scheduler, lengths):
    """The rules, counted by hand."""
    plan.validate()
    alignment = scheduler.alignment
    assert plan.alignment == alignment
    assert plan.lengths == tuple(lengths)
    assert plan.max_seqlen_per_dp_cp_rank == scheduler.max_seqlen_per_dp_cp_rank
    assert sorted(s for pack in plan.packs() for s in pack.samples) == list(range(len(lengths)))
    assert walk(plan) == {}
    for pack in plan.packs():
        c = pack.cp_size
        of_sample = math.lcm(alignment.sample, alignment.cut * c if alignment.cut and c > 1 else 1)
        tokens = sum(up(lengths[s], of_sample) for s in pack.samples)
        if alignment.rank > 1:
            tokens = up(tokens, alignment.rank * c)
        assert tokens <= c * plan.max_seqlen_per_dp_cp_rank
        assert plan.padding(pack) == tokens - sum(lengths[s] for s in pack.samples)


@given(cases())
@quickly
def test_dynamic_plans_count_padding(case):
    scheduler, lengths = case
    try:
        plan = scheduler.schedule(lengths)
    except PlanError as error:
        assert scheduler.mode == "lockstep" and "cannot give all" in str(error)
        return
    check(plan, scheduler, lengths)
    step = simulate(plan, scheduler.cost, scheduler.rank_speeds).step_s
    assert plan.extra["predicted_step_s"] == pytest.approx(step, rel=1e-9)
    assert plan.extra["lower_bound_s"] <= step * (1 + 1e-9)


@pytest.mark.slow
@given(cases())
@settings(max_examples=600, deadline=None)
def test_many_dynamic_plans_count_padding(case):
    test_dynamic_plans_count_padding.hypothesis.inner_test(case)


@given(cases(mode="free", microbatch_multiple=1), st.data())
@quickly
def test_static_plans_count_padding(case, data):
    scheduler, lengths = case
    alignment, limit = scheduler.alignment, scheduler.max_seqlen_per_dp_cp_rank
    possible = [c for c in sizes_of(scheduler.ranks) if c * alignment.limit(limit) >= max(lengths)]
    assume(possible)
    c = data.draw(st.sampled_from(possible))
    static = StaticScheduler(scheduler.ranks, limit, c, alignment=alignment)
    check(static.schedule(lengths), static, lengths)


@given(cases(mode="free", microbatch_multiple=1, min_context_parallel_size=1, max_context_parallel_size=None))
@settings(max_examples=30, deadline=None)
def test_plans_of_megatrons_scheduler_count_padding(case):
    scheduler, lengths = case
    assume(scheduler.ranks in (1, 2, 4, 8))
    alignment, limit = scheduler.alignment, scheduler.max_seqlen_per_dp_cp_rank
    megatron = MegatronScheduler(scheduler.ranks, limit, alignment=alignment)
    try:
        plan = megatron.schedule(lengths)
    except PlanError as error:
        assert "Megatron-Core's" in str(error)  # it fails by itself, padding or not
        return
    check(plan, megatron, lengths)


def test_a_full_rank_has_room_for_padding_or_takes_another_pack():
    """Four samples of 250 fit on one rank of 1000, but not if each is padded to 256."""
    for alignment, packs in ((NO_ALIGNMENT, 1), (Alignment(sample=16), 2)):
        assert len(list(StaticScheduler(1, 1000, 1, alignment=alignment).schedule([250] * 4).packs())) == packs
        assert len(list(DynamicScheduler(1, 1000, alignment=alignment).schedule([250] * 4).packs())) == packs


# ------------------------------------------------------------------ what is refused


def test_a_plan_whose_padding_passes_the_limit_is_refused():
    plan = StepPlan(2, 300, (300, 70), ((Pack(0, 1, (0,)), Pack(1, 1, (1,))),))
    plan.validate()
    with pytest.raises(PlanError, match=r"512 tokens, 212 of them padding \(samples .*256 x CP size\), on 1 rank"):
        replace(plan, alignment=Alignment.fp8()).validate()


def test_a_sample_too_long_with_its_padding_is_refused():
    scheduler = DynamicScheduler(2, 1000, alignment=Alignment.fp8())
    scheduler.schedule([2 * 768])
    with pytest.raises(SampleTooLongError, match=r"1537 tokens.* fits is 1536"):
        scheduler.schedule([2 * 768 + 1])


def test_a_limit_below_the_alignment_is_refused():
    needed = "give a multiple of 256 tokens"
    with pytest.raises(ConfigurationError, match=needed):
        DynamicScheduler(2, 200, alignment=Alignment.fp8())
    with pytest.raises(ConfigurationError, match=needed):
        MegatronScheduler(2, 200, alignment=Alignment.fp8())
    with pytest.raises(PlanError, match=needed):
        StaticScheduler(2, 200, 1, alignment=Alignment.fp8()).schedule([5])


# ------------------------------------------------------------------ what is told


def test_plans_keep_their_alignment_as_json_and_in_their_digest():
    plan = DynamicScheduler(4, 2048, alignment=Alignment.fp8()).schedule([3000, 20, 7, 400])
    again = StepPlan.from_json(plan.to_json())
    assert (again, again.alignment, again.digest()) == (plan, Alignment.fp8(), plan.digest())
    assert replace(plan, alignment=NO_ALIGNMENT).digest() != plan.digest()
    assert "alignment" not in replace(plan, alignment=NO_ALIGNMENT).to_json()
    with pytest.raises(PlanError, match="sample, cut and rank"):
        StepPlan.from_json(plan.to_json() | {"alignment": {"sample": 16}})


def test_padding_is_counted():
    plan = StepPlan(4, 512, (300, 70), ((Pack(0, 2, (0,)), Pack(2, 1, (1,))),), alignment=Alignment.fp8())
    scheduler = DynamicScheduler(4, 512)
    assert summarize(plan, scheduler.cost, lower_bound_s=0.0).padding == (512 - 300) + (256 - 70)
    assert summarize(replace(plan, alignment=NO_ALIGNMENT), scheduler.cost, lower_bound_s=0.0).padding == 0
