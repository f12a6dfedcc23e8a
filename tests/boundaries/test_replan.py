"""Batches in which some samples have no room at any CP size: all other packs are mended."""

import pytest

from lightning_dcp.boundaries.budget import BoundaryBudget
from lightning_dcp.boundaries.settle import settle
from lightning_dcp.schedule import DynamicScheduler, Pack, StaticScheduler, StepPlan
from tests.boundaries.support import COST, chat

BUDGET = BoundaryBudget(None, 300)
HOPELESS = chat(("user", 100, 1.0), ("tool", 1500, 3.0))
DENSE = chat(("user", 200, 1.0), ("tool", 250, 3.0))
PLAIN = chat(("user", 400, 1.0))


def split_of(*samples):
    return tuple(length for length, _ in samples), [own for _, own in samples]


def refused(settled):
    packs = list(settled.plan.packs())
    return sorted({packs[finding.pack].samples for finding in settled.audit.at_least("refuse")})


def plan_of(lengths, *packs, layout="budgeted", ranks=4):
    made = tuple((Pack(0, size, samples, layout),) for size, samples in packs)
    return StepPlan(ranks, 4000, lengths, made)


@pytest.mark.parametrize("layout", ["budgeted", "zigzag", "contiguous"])
def test_packs_beside_a_sample_without_room_are_mended(layout):
    lengths, segments = split_of(DENSE, DENSE, HOPELESS, PLAIN, DENSE, DENSE, DENSE)
    plan = plan_of(lengths, (1, (0, 1)), (4, (2, 3)), (2, (4, 5, 6)), layout=layout)
    names = [f"chat-{n}" for n in range(7)]
    settled = settle(plan, lengths, segments, BUDGET, COST, "replan", sample_ids=names)
    settled.plan.validate()
    assert refused(settle(plan, lengths, segments, BUDGET, COST)) == [(0, 1), (2, 3), (4, 5, 6)]
    (own,) = refused(settled)
    assert 2 in own
    assert not {0, 1, 4, 5, 6} & set(own)
    (note,) = settled.audit.notes
    assert note.startswith("replanned: 2 of 3 mended; sample(s) chat-2 cannot be")
    assert settled == settle(plan, lengths, segments, BUDGET, COST, "replan", sample_ids=names)


def test_what_lies_beside_it_in_its_own_pack_is_taken_out_if_that_is_over_the_budget():
    lengths, segments = split_of(HOPELESS, DENSE, DENSE, DENSE, DENSE, DENSE, DENSE, DENSE)
    plan = plan_of(lengths, (4, (0, 1, 2, 3, 4, 5)), (1, (6, 7)))
    settled = settle(plan, lengths, segments, BUDGET, COST, "replan")
    kept = [pack.samples for pack in settled.plan.packs() if 0 not in pack.samples]
    assert sorted(sample for samples in kept for sample in samples)[-2:] == [6, 7]
    assert all(250 * len(pack.samples) <= 300 * pack.cp_size for pack in settled.plan.packs() if 0 not in pack.samples)
    assert [len(samples) for samples in refused(settled)] == [len(refused(settled)[0])]
    assert settled.audit.notes[0].startswith("replanned: 1 of 2 mended; sample(s) 0 cannot be")


def test_where_no_pack_can_be_mended_the_plan_stays_and_the_note_names_the_samples():
    lengths, segments = split_of(HOPELESS, HOPELESS, PLAIN, DENSE)
    plan = plan_of(lengths, (4, (0,)), (4, (1, 2)), (1, (3,)))
    settled = settle(plan, lengths, segments, BUDGET, COST, "replan")
    assert settled.plan is plan
    assert settled.audit.notes[0].startswith("not replanned: 2 of 3 pack(s)")
    assert "sample(s) 0 and 1 cannot be" in settled.audit.notes[0]


@pytest.mark.parametrize("mode", ["free", "lockstep"])
@pytest.mark.parametrize("static", [False, True])
def test_schedulers_plans_are_mended_in_both_modes(mode, static):
    lengths, segments = split_of(*[DENSE] * 20, HOPELESS, *[PLAIN] * 7)
    made = StaticScheduler(4, 2048, 2, "budgeted", mode) if static else DynamicScheduler(4, 2048, COST, mode=mode)
    plan = made.schedule(lengths)
    before = refused(settle(plan, lengths, segments, BUDGET, COST))
    assert len(before) > 1
    settled = settle(plan, lengths, segments, BUDGET, COST, "replan")
    settled.plan.validate()
    assert settled.plan.mode == mode
    (own,) = refused(settled)
    assert 20 in own
    assert "sample(s) 20 cannot be" in settled.audit.notes[0]


def test_a_plain_layout_gets_groups_per_sample_where_no_single_size_does():
    early = chat(("tool", 250, 3.0), ("user", 2500, 1.0))
    lengths, segments = split_of(early, early, DENSE, DENSE)
    plan = plan_of(lengths, (2, (0, 1, 2, 3)), layout="contiguous")
    settled = settle(plan, lengths, segments, BUDGET, COST, "replan")
    assert settle(plan, lengths, segments, BUDGET, COST).audit.level == "refuse"
    assert settled.audit.level != "refuse"
    assert settled.audit.notes[0].startswith("replanned, as 1 of 1 pack(s)")
