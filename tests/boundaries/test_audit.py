"""The audit: nothing on clean plans, and each planted fault by its name."""

import pytest
from hypothesis import given, settings

from lightning_dcp.boundaries.audit import audit
from lightning_dcp.boundaries.budget import BoundaryBudget
from lightning_dcp.boundaries.budgeted import budgeted
from lightning_dcp.boundaries.findings import Audit
from lightning_dcp.errors import PlanError
from lightning_dcp.parallel.layout import PackLayout
from lightning_dcp.schedule import Pack, StepPlan
from tests.boundaries.support import COST, chat, dense_tokens, loads_of, packs

TURNS = [("user", 400, 1.0), ("tool", 200, 3.0), ("assistant", 400, 1.0)]
LENGTH, SEGMENTS = chat(*TURNS * 4)
BUDGET = BoundaryBudget(1100, 250)
PLAN = StepPlan(8, 2000, (50, LENGTH), ((Pack(0, 4, (0,)), Pack(4, 4, (1,), "budgeted")),))
ALL = [(), SEGMENTS]


def clean():
    return budgeted([LENGTH], 4, [SEGMENTS], BUDGET, COST)


def audit_with(layout, budget=BUDGET, **options):
    small = budgeted([50], 4, None, budget)
    return audit(PLAN, ALL, budget, [small, layout], cost=COST, sample_ids=["a", "b"], **options)


def moved(layout, source, target, part):
    """The layout with ``(start, end)`` of the one sample on another rank."""
    ranks = [[(0, c.start, c.end) for c in chunks] for chunks in layout.ranks]
    start, end = part
    kept = []
    for _, a, b in ranks[source]:
        kept += [(0, a, min(b, start))] if a < start else []
        kept += [(0, max(a, end), b)] if b > end else []
    ranks[source] = [chunk for chunk in kept if chunk[1] < chunk[2]]
    ranks[target].append((0, start, end))
    return PackLayout.from_chunks(layout.lengths, ranks)


def holder(layout, token):
    return next(r for r, chunks in enumerate(layout.ranks) for c in chunks if c.start <= token < c.end)


def test_a_clean_plan_has_findings_for_information_only():
    found = audit_with(clean())
    assert found.level == "ok"
    assert found.at_least("warn") == ()
    assert {f.kind for f in found.findings} >= {"tokens", "dense", "imbalance", "dense_run", "distance"}
    run = next(f for f in found.findings if f.kind == "dense_run")
    assert (run.pack, run.value) == (1, 200)


@settings(max_examples=100, deadline=None)
@given(packs())
def test_budgeted_layouts_with_room_give_no_refusal(pack):
    lengths, segments, size, _ = pack
    budget = BoundaryBudget(2 * sum(lengths), None)
    plan = StepPlan(size, 2 * sum(lengths), tuple(lengths), ((Pack(0, size, tuple(range(len(lengths))), "budgeted"),),))
    assert audit(plan, segments, budget, cost=COST).level != "refuse"


def test_a_moved_dense_segment_is_over_the_budget_of_dense_tokens():
    layout = clean()
    first, second = SEGMENTS[1], SEGMENTS[4]
    source, target = holder(layout, second.start), holder(layout, first.start)
    found = audit_with(moved(layout, source, target, second[:2]), BoundaryBudget(1600, 250))
    (over,) = found.at_least("refuse")
    assert (over.kind, over.pack, over.rank, over.sample, over.value, over.limit) == (
        "dense",
        1,
        4 + target,
        "b",
        400,
        250,
    )
    assert over.segment in (1, 4)
    assert "rank" in over.text and "400 dense tokens" in over.text


def test_an_overfilled_shard_is_over_the_budget_of_tokens():
    layout = clean()
    long = next(s for s in SEGMENTS if s.kind == "assistant" and holder(layout, s.start) != 0)
    inside = next(c for c in layout.ranks[holder(layout, long.start)] if c.start <= long.start < c.end)
    part = (long.start, min(long.end, inside.end))
    found = audit_with(moved(layout, holder(layout, long.start), 0, part))
    kinds = {(f.kind, f.rank) for f in found.at_least("refuse")}
    assert kinds == {("tokens", 4)}
    roomy = BoundaryBudget(4000, 250)
    (uneven,) = audit_with(moved(layout, holder(layout, long.start), 0, part), roomy).at_least("warn")
    assert (uneven.level, uneven.kind, uneven.rank, uneven.sample) == ("warn", "imbalance", 4, "b")
    assert uneven.value > uneven.limit


def test_a_cut_dense_segment_is_named():
    layout, segment = clean(), SEGMENTS[7]
    source = holder(layout, segment.start)
    target = min((r for r in range(4) if r != source), key=lambda r: loads_of(layout, [SEGMENTS], BUDGET)[r].tokens)
    found = audit_with(moved(layout, source, target, (segment.start, segment.start + 30)), BoundaryBudget(1200, 400))
    (cut,) = found.at_least("warn")
    assert (cut.level, cut.kind, cut.pack, cut.sample, cut.segment, cut.value) == ("warn", "cut", 1, "b", 7, 2)


def test_a_segment_over_a_budget_is_named_and_no_cut_of_it_is_told_twice():
    found = audit_with(budgeted([LENGTH], 4, [SEGMENTS], BoundaryBudget(1200, 199)), BoundaryBudget(1200, 203))
    assert found.level in ("ok", "warn")
    limit = BoundaryBudget(1200, 199)
    pieces = audit_with(budgeted([LENGTH], 4, [SEGMENTS], limit), limit)
    named = [f for f in pieces.findings if f.kind == "oversized"]
    assert [(f.level, f.sample, f.segment, f.value, f.limit) for f in named] == [
        ("warn", "b", place, 200, 199) for place in (1, 4, 7, 10)
    ]
    assert not [f for f in pieces.at_least("warn") if f.kind == "cut"]


def test_a_pack_with_more_than_its_shards_may_hold_is_told_the_size_that_would_do():
    limit = BoundaryBudget(1100, 110)
    found = audit_with(budgeted([LENGTH], 4, [SEGMENTS], limit), limit)
    refused = found.at_least("refuse")
    assert {f.kind for f in refused} == {"dense"}
    assert all("a CP size of 8 or more would do" in f.text for f in refused)


def test_a_pack_with_more_than_the_plane_may_hold_is_told_the_budget_that_would_do():
    limit = BoundaryBudget(1100, 90)
    found = audit_with(budgeted([LENGTH], 4, [SEGMENTS], limit), limit)
    refused = found.at_least("refuse")
    assert refused
    for finding in refused:
        assert "CP size" not in finding.text
        assert "The pack has 800 dense tokens, more than all 8 rank(s) of the plane may hold" in finding.text
        assert "dense_limit=100 would do there, dense_limit=200 on 4 rank(s)" in finding.text


def test_distance_counts_hops_to_the_ranks_that_need_the_keys():
    length, segments = chat(("tool", 10, 2.0), ("user", 10, 1.0), ("user", 10, 1.0), ("user", 10, 1.0))
    plan = StepPlan(4, 50, (length,), ((Pack(0, 4, (0,)),),))
    layout = PackLayout.from_chunks([length], [[(0, 10 * r, 10 * r + 10)] for r in range(4)])
    near = PackLayout.from_chunks([length], [[(0, 0, 40)], [], [], []])

    def hops(layout, ring=range(4)):
        found = audit(plan, [segments], BoundaryBudget(), [layout], rings=[ring]).findings
        return next(f.value for f in found if f.kind == "distance")

    assert hops(layout) == 10 * 3
    assert hops(layout, [0, 3, 2, 1]) == 10 * 3
    assert hops(layout, [1, 0, 2, 3]) == 10 * 3
    assert hops(near) == 0


@given(packs())
@settings(max_examples=50, deadline=None)
def test_json_and_lines_tell_all(pack):
    lengths, segments, size, budget = pack
    plan = StepPlan(size, sum(lengths), tuple(lengths), ((Pack(0, size, tuple(range(len(lengths)))),),))
    found = audit(plan, segments, budget, cost=COST)
    assert Audit.from_json(found.to_json()) == found
    assert len(found.lines()) == len(found.findings)
    assert found.to_json()["level"] == found.level
    if dense_tokens(segments):
        assert {f.kind for f in found.findings} >= {"dense_run"}


def test_layouts_of_another_plan_are_refused():
    with pytest.raises(PlanError, match=r"1 layout\(s\)"):
        audit(PLAN, ALL, BUDGET, [clean()])
    with pytest.raises(PlanError, match="other samples or ranks"):
        audit(PLAN, ALL, BUDGET, [clean(), clean()])
    with pytest.raises(PlanError, match="for a batch of 2"):
        audit(PLAN, [()], BUDGET)


def test_texts_say_which_budget_and_which_part_of_a_segment():
    length, own = chat(("user", 100, 1.0), ("tool", 900, 3.0), ("user", 100, 1.0))
    plan = StepPlan(4, 2000, (length,), ((Pack(0, 4, (0,), "contiguous"),),))
    dense = audit(plan, [own], BoundaryBudget(None, 200))
    (oversized,) = [f for f in dense.findings if f.kind == "oversized"]
    assert "is larger than the budget of 200 dense tokens on a rank by itself" in oversized.text
    held = [f.text for f in dense.at_least("refuse")]
    assert "segment 1, tokens 100..1000 of density 3, of which tokens 275..550 here" in held[0]
    (tokens,) = [f for f in audit(plan, [own], BoundaryBudget(800)).findings if f.kind == "oversized"]
    assert "is larger than the budget of 800 tokens on a rank by itself" in tokens.text
    alone = StepPlan(4, 2000, (length,), ((Pack(0, 1, (0,), "contiguous"),),))
    whole = audit(alone, [own], BoundaryBudget(None, 200)).at_least("refuse")[0].text
    assert "tokens 100..1000 of density 3" in whole
    assert "of which" not in whole
