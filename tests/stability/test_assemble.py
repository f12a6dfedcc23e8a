"""Records out of what ranks told, and what was to be expected of them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from lightning_dcp.parallel.layout import PackLayout
from lightning_dcp.parallel.link_table import LinkTable
from lightning_dcp.parallel.rank_times import LinkSummary, RankSummary
from lightning_dcp.schedule.alignment import Alignment
from lightning_dcp.schedule.cost import CostModel
from lightning_dcp.schedule.dynamic import DynamicScheduler
from lightning_dcp.schedule.plan import Pack, StepPlan
from lightning_dcp.segments import Segment
from lightning_dcp.stability.assemble import assemble
from lightning_dcp.stability.expected import HopExpectation, work_parts

COST = CostModel(linear=1e-5, attention=1e-9, efficiency=((16, 0.5), (64, 1.0)), pack_overhead=1e-3, hop_latency=5.0)
PLAN = StepPlan(
    4,
    64,
    (100, 20, 9),
    ((Pack(0, 2, (0,)), Pack(2, 1, (1,))), (Pack(2, 1, (2,)),)),
    extra={"cost_model": COST.to_dict(), "predicted_step_s": 0.5},
)


def told(place: int, busy: float = 1.0, start: float = 10.0, **more: Any) -> RankSummary:
    return RankSummary(place, start, start + 2, busy, 0.1, 0.2, **more)


def link(source: int, target: int, typical: float, fastest: float = 0.0, num_bytes: int = 1 << 20) -> LinkSummary:
    return LinkSummary(source, target, 2, 2 * num_bytes, 2 * typical, typical, fastest or typical)


def expectation(table: LinkTable | None = None) -> HopExpectation:
    return HopExpectation(table, 5)


def test_a_ranks_work_is_what_the_cost_model_says_without_hops() -> None:
    parts = work_parts(PLAN)
    assert parts[0] == parts[1] and parts[3] == (0, 0, 0, 0)
    assert sum(parts[0]) == pytest.approx(COST.pack_seconds([100], 2) - COST.exposed_seconds(2, 100, 0))
    assert sum(parts[2]) == pytest.approx(COST.pack_seconds([20]) + COST.pack_seconds([9]))
    assert parts[2][0] == pytest.approx(2e-3) and parts[2][1] == pytest.approx(29e-5)


def test_work_is_dealt_out_as_the_plans_layout_deals_out_tokens() -> None:
    contiguous = replace(PLAN, microbatches=((Pack(0, 2, (0,), "contiguous"), Pack(2, 2, (1, 2))),))
    parts, even = work_parts(contiguous), COST.attention_seconds([100], 2)[0]
    assert [parts[0][1], parts[1][1]] == pytest.approx([50e-5, 50e-5])
    assert [parts[0][2], parts[1][2]] == pytest.approx([even / 2, even * 3 / 2])  # 50^2 of 100^2 pairs, and the rest
    assert parts[2] == parts[3]


def test_work_is_dealt_out_by_the_layout_that_is_told_whatever_the_plan_names() -> None:
    layout = PackLayout.from_chunks([100], [[(0, 0, 30)], [(0, 30, 100)]])
    parts, even = work_parts(PLAN, (layout, None, None)), COST.attention_seconds([100], 2)[0]
    assert [parts[0][1], parts[1][1]] == pytest.approx([30e-5, 70e-5])
    assert [parts[0][2], parts[1][2]] == pytest.approx([even * 2 * 0.09, even * 2 * 0.91])
    assert parts[2] == work_parts(PLAN)[2]


def test_densities_add_to_the_linear_work_of_the_rank_that_holds_them() -> None:
    layout = PackLayout.from_chunks([100], [[(0, 0, 30)], [(0, 30, 100)]])
    segments = [(Segment(20, 50, "tool", 3.0), Segment(50, 60, "user")), (Segment(0, 10, "page", 0.5),), ()]
    parts = work_parts(PLAN, (layout, None, None), segments)
    assert [rank[3] for rank in parts] == pytest.approx([20e-5, 40e-5, -5e-5, 0.0])
    assert [rank[3] for rank in work_parts(PLAN, (), segments)] == pytest.approx([10e-5, 50e-5, -5e-5, 0.0])  # zigzag
    assert [rank[3] for rank in work_parts(PLAN, (), [(), (), ()])] == [0.0] * 4
    record = assemble(0, PLAN, [told(p) for p in range(4)], expectation(), (layout, None, None), segments)
    assert [rank.expected_parts for rank in record.ranks] == list(parts)


def test_padding_counts_as_tokens() -> None:
    padded = StepPlan(1, 64, (20,), ((Pack(0, 1, (0,)),),), extra=PLAN.extra, alignment=Alignment.fp8())
    tokens = Alignment.fp8().in_pack(Alignment.fp8().padded(20, 1), 1)
    assert tokens > 20 and work_parts(padded)[0][1] == pytest.approx(tokens * COST.linear)


def test_plans_without_a_cost_model_are_weighed_by_that_of_a_common_machine() -> None:
    bare = StepPlan(PLAN.ranks, 64, PLAN.lengths, PLAN.microbatches)
    assert all(math.fsum(parts) > 0 for parts in work_parts(bare)[:3])


def test_the_step_lasts_from_the_first_start_to_the_last_end() -> None:
    record = assemble(7, PLAN, [told(0), told(1, start=10.5), told(2), told(3)], expectation())
    assert (record.step, record.seconds, record.tokens, record.predicted_s) == (7, 2.5, 129, 0.5)
    assert [rank.rank for rank in record.ranks] == [0, 1, 2, 3]
    assert record.ranks[2].expected_s == pytest.approx(math.fsum(record.ranks[2].expected_parts))


def test_of_the_ranks_at_one_place_the_slowest_speaks() -> None:
    """As with tensor parallelism: eight ranks of the world at four places."""
    every = [
        told(p, busy=1.0 + p + t, links=(link(0, 1, 0.1 + t),) if p == 1 else ()) for t in (0, 1) for p in range(4)
    ]
    record = assemble(0, PLAN, every, expectation())
    assert [rank.busy_s for rank in record.ranks] == [2, 3, 4, 5]
    assert [(k.source, k.target, k.typical_s) for k in record.links] == [(0, 1, 1.1)]


def test_where_both_directions_end_together_only_the_link_that_is_slow_at_both_ends_is_slow() -> None:
    """A ring of three with a slow link 0->1: rank 0 is held up in its hop from 2, and rank 1 in its hop to 2."""
    every = [
        told(0, links=(link(2, 0, 0.02),), sent=(link(0, 1, 0.02),)),
        told(1, links=(link(0, 1, 0.02),), sent=(link(1, 2, 0.02),)),
        told(2, links=(link(1, 2, 0.001),), sent=(link(2, 0, 0.001),)),
        told(3),
    ]
    record = assemble(0, PLAN, every, expectation())
    assert {(k.source, k.target): k.typical_s for k in record.links} == {(0, 1): 0.02, (1, 2): 0.001, (2, 0): 0.001}


def test_tries_of_links_are_told_apart_from_hops() -> None:
    record = assemble(0, PLAN, [told(0), told(1), told(2), told(3, probes=(link(2, 3, 0.03),))], expectation())
    assert record.links == () and [(k.source, k.target, k.typical_s) for k in record.probes] == [(2, 3, 0.03)]


def test_a_table_of_links_says_what_to_expect() -> None:
    table = LinkTable(((0.0, 1e-3), (2e-3, 0.0)), ((1e9, 1e9), (1e9, 1e9)))
    assert expectation(table).seconds(1, 0, 1e6) == pytest.approx(3e-3)


def test_without_a_table_the_other_links_do() -> None:
    hops = expectation()
    assert hops.seconds(0, 1, 1e6) == 0.0
    hops.see([link(0, 1, 9.0), *(link(s, s + 1, 0.0, fastest) for s, fastest in ((1, 2e-3), (2, 3e-3), (3, 9e-3)))])
    assert hops.seconds(0, 1, 1 << 20) == 2e-3  # the lower quartile, without its own
    assert hops.seconds(0, 1, 1 << 22) == pytest.approx(8e-3)  # four times as large: at most four times as long
    assert hops.seconds(0, 1, 10) == 2e-3  # smaller: at most as long
    for _ in range(5):
        hops.see([link(1, 2, 0.0, 5e-4, num_bytes=1 << 10)])
    assert hops.seconds(0, 1, 1 << 20) == pytest.approx(5e-4 * 1024)  # what was seen long ago is forgotten


def test_a_plan_of_the_dynamic_scheduler_predicts_what_its_ranks_do() -> None:
    plan = DynamicScheduler(4, 64, COST).schedule([100, 60, 20, 9])
    assert sum(sum(parts) for parts in work_parts(plan)) > 0
    record = assemble(0, plan, [told(p) for p in range(4)], expectation())
    assert record.predicted_s == plan.extra["predicted_step_s"]
