"""The budgeted layout: every token once, budgets, balance, dense segments whole, few chunks, the same everywhere."""

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dcp.boundaries.audit import audit
from lightning_dcp.boundaries.budget import BoundaryBudget
from lightning_dcp.boundaries.budgeted import budgeted
from lightning_dcp.errors import PlanError
from lightning_dcp.parallel.layout import zigzag
from lightning_dcp.schedule import CostModel, Pack, StepPlan
from lightning_dcp.segments import Segment
from tests.boundaries.support import COST, chat, dense_tokens, loads_of, packs

LINEAR = CostModel(1.0, 0.0)
ATTENTION = CostModel(0.0, 1.0)
COSTS = st.sampled_from([COST, LINEAR, ATTENTION, CostModel(1.0, 0.01)])


@settings(max_examples=300, deadline=None)
@given(packs(), COSTS)
def test_budgets_are_kept_unless_the_audit_names_what_made_it_impossible(pack, cost):
    lengths, segments, size, budget = pack
    layout = budgeted(lengths, size, segments, budget, cost)
    layout.validate()
    loads = loads_of(layout, segments, budget, cost)
    totals = {
        "tokens": (sum(lengths), budget.max_tokens),
        "dense": (dense_tokens(segments), budget.dense_limit),
    }
    limit = max(lengths) + sum(lengths)
    plan = StepPlan(size, limit, tuple(lengths), ((Pack(0, size, tuple(range(len(lengths))), "budgeted"),),))
    found = audit(plan, segments, budget, [layout], cost=cost).findings
    for kind, (total, most) in totals.items():
        held = [load.tokens if kind == "tokens" else load.dense_tokens for load in loads]
        refused = [f for f in found if f.kind == kind and f.level == "refuse"]
        if most is None or total <= size * most:
            assert most is None or max(held) <= most
            assert not refused
        else:  # shared out evenly, and each shard over its budget names the segment that has most of it
            assert max(held) <= -(-total // size)
            assert sorted(f.rank for f in refused) == [rank for rank, count in enumerate(held) if count > most]
            assert all(f.sample is not None and f"={-(-total // size)} would do" in f.text for f in refused)
    assert {(f.sample, f.segment) for f in found if f.kind == "oversized"} == {
        (s, n)
        for s, own in enumerate(segments)
        for n, segment in enumerate(own)
        if segment.num_tokens
        > min(budget.max_tokens, (budget.dense_limit or limit) if budget.is_dense(segment) else limit)
    }


@settings(max_examples=300, deadline=None)
@given(packs(), COSTS)
def test_no_shard_has_much_more_work_than_zigzags_heaviest(pack, cost):
    lengths, segments, size, budget = pack
    if dense_tokens(segments) > size * (budget.dense_limit or sum(lengths)):
        return  # the budget of dense tokens comes first
    heaviest = max(
        load.work_s for load in loads_of(budgeted(lengths, size, segments, budget, cost), segments, budget, cost)
    )
    of_zigzag = max(load.work_s for load in loads_of(zigzag(lengths, size), segments, budget, cost))
    limit = budget.dense_limit or sum(lengths)
    if max(load.dense_tokens for load in loads_of(zigzag(lengths, size), segments, budget, cost)) <= limit:
        assert heaviest <= (1.0 + budget.tolerance) * of_zigzag * (1 + 1e-8)  # sums in another order
    elif limit >= 1.5 * -(-dense_tokens(segments) // size) and sum(lengths) >= 20 * size:
        # Zigzag breaks the budget of dense tokens, but it leaves a choice: half as much again as an even share, and tokens
        # enough on each rank that one of them weighs little. The goal is within 10 % of zigzag even where less is asked for.
        assert heaviest <= (1.0 + max(budget.tolerance, 0.1)) * of_zigzag


def test_dense_segments_stay_whole_and_plain_tokens_fill_up():
    turns = [("user", 700, 1.0), ("tool", 300, 3.0), ("tool", 250, 3.0), ("assistant", 900, 1.0), ("tool", 320, 3.0)]
    length, segments = chat(*turns, *turns[:3], ("assistant", 1500, 1.0))
    budget = BoundaryBudget(2000, 650)
    layout = budgeted([length], 4, [segments], budget, COST)
    loads = loads_of(layout, [segments], budget)
    holders = [
        {rank for rank, load in enumerate(loads) for p in load.parts if p.segment == n} for n in range(len(segments))
    ]
    assert all(len(ranks) == 1 for ranks, segment in zip(holders, segments, strict=True) if segment.density > 1)
    assert max(load.dense_tokens for load in loads) <= 650
    assert max(load.tokens for load in loads) <= 2000
    mean = sum(load.work_s for load in loads) / 4
    assert max(load.work_s for load in loads) <= 1.1 * mean
    zigzagged = loads_of(zigzag([length], 4), [segments], budget)
    assert max(load.dense_tokens for load in zigzagged) < max(load.tokens for load in zigzagged)
    assert sum(map(len, layout.ranks)) <= 4 * 4


def test_cuts_lie_on_borders_where_that_fits():
    length, segments = chat(*[("tool" if i % 6 == 0 else "user", 50, 2.0 if i % 6 == 0 else 1.0) for i in range(48)])
    layout = budgeted([length], 4, [segments], BoundaryBudget(900, 200), LINEAR)
    borders = {segment.start for segment in segments} | {length}
    assert all(chunk.start in borders and chunk.end in borders for chunks in layout.ranks for chunk in chunks)


def test_many_short_chats_are_not_cut_into_many_chunks():
    turns = ("user", 60, 1.0), ("tool", 100, 3.0), ("assistant", 240, 1.0)
    lengths, segments = zip(*[chat(*turns) for _ in range(32)], strict=True)
    budget = BoundaryBudget(1800, 450)
    layout = budgeted(lengths, 8, segments, budget, COST)
    assert sum(map(len, layout.ranks)) <= 2 * 32 < sum(map(len, zigzag(lengths, 8).ranks))
    work = [load.work_s for load in loads_of(layout, segments, budget)]
    assert max(work) <= 1.1 * sum(work) / 8


def test_a_dense_segment_larger_than_its_budget_is_split_into_as_few_parts_as_need_be():
    length, segments = chat(("user", 500, 1.0), ("tool", 1000, 2.0), ("assistant", 500, 1.0))
    layout = budgeted([length], 4, [segments], BoundaryBudget(800, 400), LINEAR)
    parts = [load.dense_tokens for load in loads_of(layout, [segments], BoundaryBudget(800, 400), LINEAR)]
    assert max(parts) <= 400
    assert sum(parts) == 1000
    assert sum(part > 0 for part in parts) in (3, 4)


def test_a_dense_segment_too_heavy_for_one_rank_is_cut_for_balance():
    length, segments = chat(("user", 100, 1.0), ("tool", 1000, 3.0), ("assistant", 100, 1.0))
    budget = BoundaryBudget(1200, None)
    work = [
        load.work_s for load in loads_of(budgeted([length], 4, [segments], budget, LINEAR), [segments], budget, LINEAR)
    ]
    assert max(work) <= 1.1 * sum(work) / 4


@given(st.lists(st.integers(1, 70), min_size=1, max_size=6), st.integers(1, 9))
def test_samples_without_dense_segments_are_cut_as_zigzag_cuts_them(lengths, size):
    budget = BoundaryBudget(-(-sum(lengths) // size), 10)
    plain = [(Segment(0, length, "user"),) for length in lengths]
    for segments in (None, [()] * len(lengths), plain):
        assert budgeted(lengths, size, segments, budget) == zigzag(lengths, size)


def test_the_densest_shards_go_to_the_preferred_ranks():
    length, segments = chat(
        ("user", 600, 1.0), ("tool", 300, 3.0), ("user", 500, 1.0), ("tool", 100, 3.0), ("user", 500, 1.0)
    )
    budget = BoundaryBudget(900, 400)
    layout = budgeted([length], 4, [segments], budget, COST, preferred=[2, 0])
    dense = [load.dense_tokens for load in loads_of(layout, [segments], budget)]
    assert (dense[2], dense[0]) == tuple(sorted(dense, reverse=True)[:2])
    assert set(layout.ranks) == set(budgeted([length], 4, [segments], budget, COST).ranks)
    for preferred in ([4], [1, 1]):
        with pytest.raises(PlanError, match="preferred"):
            budgeted([length], 4, [segments], budget, COST, preferred=preferred)


def test_segments_of_other_samples_are_refused():
    with pytest.raises(PlanError, match="segments of 1 sample"):
        budgeted([5, 5], 2, [()], BoundaryBudget())
    with pytest.raises(PlanError, match="ends at 9"):
        budgeted([5], 2, [(Segment(0, 9),)], BoundaryBudget())


PROGRAM = """
import json
from lightning_dcp.boundaries.budget import BoundaryBudget
from lightning_dcp.boundaries.budgeted import budgeted
from lightning_dcp.segments import Segment

def layouts():
    segments = [tuple(Segment(i * 40, i * 40 + 40, "tool", 3.0 if (i * i + s) % 4 == 0 else 1.0) for i in range(50))
                for s in range(3)]
    made = [budgeted([2000] * 3, c, segments, BoundaryBudget(6000 // c + 90, 1700 // c)) for c in (2, 5, 8)]
    return json.dumps([[[list(vars(c).values()) for c in chunks] for chunks in layout.ranks] for layout in made])
"""


def test_another_process_cuts_alike():
    """Nothing depends on the order of sets, which another process's hashes change."""
    here: dict = {}
    exec(PROGRAM, here)
    program = [sys.executable, "-c", f"{PROGRAM}\nprint(layouts())"]
    done = subprocess.run(program, env={"PYTHONHASHSEED": "7"}, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == here["layouts"]()
