"""Plans with layouts: warned of, refused, or planned anew within their budgets."""

import random

import pytest

from lightning_dcp.boundaries.budget import BoundaryBudget
from lightning_dcp.boundaries.settle import settle
from lightning_dcp.errors import BoundaryError, PlanError
from lightning_dcp.schedule import Alignment, DynamicScheduler, Pack, StaticScheduler, StepPlan, simulate
from lightning_dcp.segments import Segment
from tests.boundaries.support import COST, chat, loads_of

LIMIT = 2048


def batch(seed, samples=40):
    """Chats with clusters of dense turns."""
    drawn = random.Random(seed)
    chats = []
    for _ in range(samples):
        turns = []
        for _ in range(drawn.randint(1, 6)):
            turns.append(("user", drawn.randint(5, 150), 1.0))
            if drawn.random() < 0.3:
                turns += [("tool", drawn.randint(20, 200), 3.0) for _ in range(drawn.randint(1, 4))]
            turns.append(("assistant", drawn.randint(20, 250), 1.0))
        chats.append(chat(*turns))
    return tuple(length for length, _ in chats), [own for _, own in chats]


def scheduler(mode="free", layout="budgeted", **options):
    return DynamicScheduler(8, LIMIT, COST, layout, mode=mode, **options)


def kept(settled, segments, budget):
    """Whether every shard keeps its budgets."""
    for pack, layout in zip(settled.plan.packs(), settled.layouts, strict=True):
        loads = loads_of(layout, [segments[s] for s in pack.samples], budget)
        if max(load.dense_tokens for load in loads) > budget.dense_limit or max(load.tokens for load in loads) > LIMIT:
            return False
    return True


@pytest.mark.parametrize("mode", ["free", "lockstep"])
def test_another_plan_keeps_budgets_that_the_first_one_breaks(mode):
    notes = set()
    for seed in range(6):
        lengths, segments = batch(seed)
        plan = scheduler(mode).schedule(lengths)
        budget = BoundaryBudget(None, 420 + 60 * (seed % 3))
        warned = settle(plan, lengths, segments, budget, COST)
        assert warned.plan is plan
        assert warned.audit.level == "refuse"
        assert not kept(warned, segments, budget)
        with pytest.raises(BoundaryError, match="over the budget of"):
            settle(plan, lengths, segments, budget, COST, "error")
        other = settle(plan, lengths, segments, budget, COST, "replan")
        other.plan.validate()
        assert (other.plan.mode, other.plan.lengths, other.plan.max_seqlen_per_dp_cp_rank) == (mode, lengths, LIMIT)
        assert other.audit.level != "refuse"
        assert kept(other, segments, budget)
        assert other.plan.extra["predicted_step_s"] == pytest.approx(simulate(other.plan, COST).step_s)
        assert other == settle(plan, lengths, segments, budget, COST, "replan")
        (note,) = other.audit.notes
        notes.add(note.split(": ")[1].split(" ")[0])
        assert other.audit.lines()[-1] == note
    assert notes


def test_a_pack_is_split_and_a_group_enlarged_where_that_is_enough():
    lengths, segments = zip(
        chat(("user", 400, 1.0), ("tool", 300, 3.0)),
        chat(("user", 400, 1.0), ("tool", 300, 3.0)),
        chat(("user", 900, 1.0), ("tool", 600, 3.0)),
        *[chat(("user", 1200, 1.0))] * 3,
        strict=True,
    )
    rounds = ((Pack(0, 1, (0, 1), "budgeted"), Pack(1, 1, (2,), "budgeted")), (Pack(2, 1, (3,)), Pack(3, 1, (4, 5))))
    plan = StepPlan(4, 4000, lengths, (rounds[0], *((pack,) for pack in rounds[1])))
    other = settle(plan, lengths, segments, BoundaryBudget(None, 300), COST, "replan")
    groups = {pack.samples: (pack.first_rank, pack.cp_size) for pack in other.plan.packs()}
    assert other.audit.notes[0].startswith("replanned, as 2 of 4 pack(s)")
    assert other.audit.level == "ok" or not other.audit.at_least("refuse")
    for samples, (_, size) in groups.items():
        assert sum(600 if s == 2 else 300 for s in samples if s <= 2) <= 300 * size


def test_only_allowed_sizes_are_used_and_where_no_plan_is_found_the_audit_says_so():
    lengths, segments = batch(1)
    plan = scheduler(max_context_parallel_size=2).schedule(lengths)
    budget = BoundaryBudget(None, 640)
    other = settle(plan, lengths, segments, budget, COST, "replan", sizes=(1, 2))
    assert settle(plan, lengths, segments, budget, COST).audit.level == "refuse"
    assert {pack.cp_size for pack in other.plan.packs()} <= {1, 2}
    assert other.audit.level != "refuse"
    same = settle(plan, lengths, segments, BoundaryBudget(None, 8), COST, "replan", sizes=(1, 2))
    assert same.plan is plan
    assert same.audit.level == "refuse"
    assert "no other plan was found" in same.audit.notes[0]
    with pytest.raises(BoundaryError) as error:
        settle(plan, lengths, segments, BoundaryBudget(None, 8), COST, "error")
    assert str(error.value).count("refuse: ") == len(same.audit.at_least("refuse"))


def test_plans_within_their_budgets_are_left_alone():
    lengths, segments = batch(2)
    plan = scheduler().schedule(lengths)
    for choice in ("warn", "replan", "error"):
        settled = settle(plan, lengths, segments, BoundaryBudget(None, LIMIT), COST, choice)
        assert settled.plan is plan
        assert settled.audit.notes == ()
        assert [layout.size for layout in settled.layouts] == [pack.cp_size for pack in plan.packs()]


def test_layouts_by_name_need_none_of_their_own_and_are_audited_and_replanned():
    lengths, segments = batch(3)
    for layout in ("zigzag", "contiguous"):
        plan = scheduler(layout=layout).schedule(lengths)
        budget = BoundaryBudget(None, 450)
        warned = settle(plan, lengths, segments, budget, COST)
        assert warned.layouts == ()
        assert warned.audit.level == "refuse"
        other = settle(plan, lengths, segments, budget, COST, "replan")
        assert {pack.layout for pack in other.plan.packs()} == {layout}
        assert other.audit.level != "refuse"


def test_padding_is_kept_to_and_budgeted_layouts_refuse_it():
    lengths, segments = batch(4)
    alignment = Alignment.transformer_engine()
    plan = scheduler(layout="zigzag", alignment=alignment).schedule(lengths)
    other = settle(plan, lengths, segments, BoundaryBudget(None, 600), COST, "replan")
    assert other.plan.alignment == alignment
    other.plan.validate()
    assert other.audit.level != "refuse"
    with pytest.raises(PlanError, match="needs another"):
        settle(scheduler(alignment=alignment).schedule(lengths), lengths, segments, BoundaryBudget(), COST)


def test_static_plans_and_plain_samples_are_settled_too():
    lengths, _ = batch(5)
    plan = StaticScheduler(8, LIMIT, 4, "budgeted").schedule(lengths)
    settled = settle(plan, lengths, None, BoundaryBudget(None, 100), COST, "error")
    assert settled.audit.level == "ok"
    over = settle(plan, lengths, None, BoundaryBudget(1000), COST, "replan")
    assert settle(plan, lengths, None, BoundaryBudget(1000), COST).audit.level == "refuse"
    assert all(pack.tokens(lengths) <= 1000 * pack.cp_size for pack in over.plan.packs())


def test_bad_arguments_are_refused():
    lengths, segments = batch(0)
    plan = scheduler().schedule(lengths)
    with pytest.raises(PlanError, match="on_violation='stop'"):
        settle(plan, lengths, segments, BoundaryBudget(), COST, "stop")
    with pytest.raises(PlanError, match="a plan for samples"):
        settle(plan, lengths[:-1], segments, BoundaryBudget(), COST)


def test_dense_keys_travel_as_far_as_the_ring_says():
    """Of contiguous shards the last rank alone needs the keys of the one before it."""
    lengths, segments = (64,), ((Segment(32, 48, "tool", 2.0),),)
    plan = StepPlan(4, 64, lengths, ((Pack(0, 4, (0,), "contiguous"),),))

    def distance(ring):
        found = settle(plan, lengths, segments, BoundaryBudget(), ring=ring).audit
        return [finding.value for finding in found.findings if finding.kind == "distance"]

    assert distance(None) == distance(lambda pack: (0, 1, 2, 3)) == [16]
    assert distance(lambda pack: (0, 3, 2, 1)) == [3 * 16]


def test_the_longest_dense_run_of_each_shard_is_told():
    """Dense segments that touch are one run; the border between two ranks ends it."""
    segments = ((Segment(10, 20, "tool", 2.0), Segment(20, 30, "tool", 2.0), Segment(50, 53, "tool", 2.0)),)
    plan = StepPlan(4, 64, (64,), ((Pack(0, 4, (0,), "contiguous"),),))
    found = settle(plan, (64,), segments, BoundaryBudget()).audit
    assert [(f.rank, f.value) for f in found.findings if f.kind == "dense_run"] == [(0, 6), (1, 14), (2, 0), (3, 3)]
