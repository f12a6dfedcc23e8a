import time
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dcp.errors import PlanError, SampleTooLongError
from lightning_dcp.schedule.distributions import draw_lengths
from lightning_dcp.schedule.static import StaticScheduler
from tests.schedule.plans import batches, sizes_of, walk

quickly = settings(max_examples=100, deadline=None)


@st.composite
def cases(draw):
    """A plane, a limit, a size that holds every sample, and lengths."""
    ranks, limit, lengths = draw(batches())
    return ranks, limit, draw(st.sampled_from([c for c in sizes_of(ranks) if c * limit >= max(lengths)])), lengths


def samples_of(plan):
    return [[(pack.first_rank, pack.samples) for pack in microbatch] for microbatch in plan.microbatches]


# ------------------------------------------------------------------ the rule


def test_samples_are_packed_in_order_and_dealt_over_the_groups():
    """Capacity 20: [10, 10], [5, 6], [15], [12, 8]; two groups."""
    plan = StaticScheduler(4, 10, 2).schedule([10, 10, 5, 6, 15, 12, 8])
    assert samples_of(plan) == [[(0, (0, 1)), (2, (2, 3))], [(0, (4,)), (2, (5, 6))]]
    assert {pack.cp_size for pack in plan.packs()} == {2}


def test_a_sample_that_does_not_fit_starts_the_next_pack_even_if_later_ones_would_fit():
    plan = StaticScheduler(1, 10, 1).schedule([6, 7, 4, 3])
    assert samples_of(plan) == [[(0, (0,))], [(0, (1,))], [(0, (2, 3))]]


def test_last_samples_become_packs_until_every_group_has_as_many():
    """Three packs for four groups: the last pack with two samples gives one away."""
    plan = StaticScheduler(4, 10, 1).schedule([5, 5, 5, 5, 9])
    assert samples_of(plan) == [[(0, (0, 1)), (1, (2,)), (2, (4,)), (3, (3,))]]


def test_packs_are_emptied_from_the_last_to_the_first_down_to_one_sample():
    """Two packs of three on eight ranks: only six samples, so two ranks stay idle."""
    plan = StaticScheduler(8, 9, 1).schedule([3, 3, 3, 3, 3, 3])
    assert samples_of(plan) == [[(0, (0,)), (1, (3,)), (2, (5,)), (3, (4,)), (4, (2,)), (5, (1,))]]


def test_the_number_of_microbatches_is_made_a_multiple():
    lengths = [4] * 8
    plans = {
        m: StaticScheduler(2, 8, 1, mode="lockstep", microbatch_multiple=m).schedule(lengths) for m in (1, 2, 3, 4)
    }
    assert {m: len(plan.microbatches) for m, plan in plans.items()} == {1: 2, 2: 2, 3: 3, 4: 4}


@given(cases())
@quickly
def test_plans_keep_all_rules(case):
    ranks, limit, c, lengths = case
    plan = StaticScheduler(ranks, limit, c).schedule(lengths)
    plan.validate()
    assert plan.mode == "free"
    assert {pack.cp_size for pack in plan.packs()} == {c}
    assert walk(plan) == {}


@given(cases(), st.integers(1, 3))
@quickly
def test_in_lockstep_every_rank_has_as_many_packs(case, multiple):
    ranks, limit, c, lengths = case
    try:
        plan = StaticScheduler(ranks, limit, c, mode="lockstep", microbatch_multiple=multiple).schedule(lengths)
    except PlanError as error:
        packs = len(StaticScheduler(c, limit, c).schedule(lengths).microbatches)
        step = ranks // c * multiple
        assert -(-packs // step) * step > len(lengths), error
        return
    plan.validate()
    assert plan.mode == "lockstep"
    assert len(plan.microbatches) % multiple == 0
    assert {len(plan.packs_of(rank)) for rank in range(ranks)} == {len(plan.microbatches)}


@given(cases())
@quickly
def test_both_modes_run_the_same_packs_if_these_suffice_for_all_groups(case):
    ranks, limit, c, lengths = case
    free = StaticScheduler(ranks, limit, c).schedule(lengths)
    lockstep = StaticScheduler(ranks, limit, c, mode="lockstep")
    if len(free.microbatches[-1]) * c == ranks:
        assert lockstep.schedule(lengths).microbatches == free.microbatches
    else:
        assert all(len(pack.samples) == 1 for pack in free.packs())
        with pytest.raises(PlanError, match="use larger batches"):
            lockstep.schedule(lengths)


@given(cases())
@quickly
def test_runs_are_as_long_as_the_limit_allows(case):
    """On a plane of one group nothing is moved: each pack would overflow with the first sample of the next."""
    _, limit, c, lengths = case
    packs = list(StaticScheduler(c, limit, c).schedule(lengths).packs())
    assert [s for pack in packs for s in pack.samples] == list(range(len(lengths)))
    for pack, following in pairwise(packs):
        assert pack.tokens(lengths) + lengths[following.samples[0]] > c * limit


def test_the_layout_asked_for_is_planned():
    assert {p.layout for p in StaticScheduler(4, 9, 2, "contiguous").schedule([9, 3, 18]).packs()} == {"contiguous"}


# ------------------------------------------------------------------ what is refused


def test_too_few_samples_for_lockstep_are_told_with_what_to_do():
    with pytest.raises(PlanError) as caught:
        StaticScheduler(8, 100, 2, mode="lockstep").schedule([5, 5, 5])
    assert str(caught.value) == (
        "3 sample(s) cannot be 4 packs, which 4 groups of context_parallel_size=2 need in lock-step for 1 "
        "micro-batch(es) each: use larger batches, a larger context_parallel_size, or the dynamic scheduler"
    )
    StaticScheduler(8, 100, 2, mode="lockstep").schedule([5, 5, 5, 5])


@pytest.mark.parametrize(("ranks", "size"), [(6, 4), (8, 3), (2, 4), (4, 0), (4, -1)])
def test_a_size_that_does_not_divide_the_plane_is_refused(ranks, size):
    with pytest.raises(PlanError, match=f"context_parallel_size={size} does not divide the plane of {ranks} ranks"):
        StaticScheduler(ranks, 100, size).schedule([5, 5])


def test_a_sample_too_long_for_a_group_is_named():
    with pytest.raises(SampleTooLongError, match="sample 2 of the batch has 41 tokens"):
        StaticScheduler(8, 10, 4).schedule([3, 40, 41, 99])


@pytest.mark.parametrize("lengths", [[], [3, 0], [-1]])
def test_empty_batches_and_samples_are_refused(lengths):
    with pytest.raises(PlanError, match=r"empty batch|has (0|-1) tokens"):
        StaticScheduler(8, 10, 4).schedule(lengths)


@pytest.mark.parametrize(("mode", "multiple"), [("free", 2), ("lockstep", 0), ("lockstep", -2)])
def test_a_multiple_without_a_meaning_is_refused(mode, multiple):
    with pytest.raises(PlanError, match=f"microbatch_multiple={multiple} "):
        StaticScheduler(4, 10, 2, mode=mode, microbatch_multiple=multiple).schedule([5] * 9)


# ------------------------------------------------------------------ speed


def test_large_batches_are_planned_in_time_that_grows_with_the_samples():
    seconds = {}
    for samples in (16_384, 262_144):
        lengths = draw_lengths("megatron-mock", samples, 0)
        start = time.process_time()
        StaticScheduler(1024, 8192, 1, mode="lockstep").schedule(lengths)
        seconds[samples] = time.process_time() - start
    assert seconds[16_384] < 1
    assert seconds[262_144] < 15
