"""Shards that are unequal by layout raise no alarm; ranks that are slow under such a layout do."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping

import pytest

from lightning_dcp.boundaries.budget import BoundaryBudget
from lightning_dcp.boundaries.layouts import pack_layouts
from lightning_dcp.boundaries.pieces import Work, pieces_of, shard_loads
from lightning_dcp.parallel.layout import PackLayout
from lightning_dcp.parallel.ring_orders import RingOrders
from lightning_dcp.schedule.hardware import preset
from lightning_dcp.schedule.plan import Pack, StepPlan
from lightning_dcp.segments import SampleSegments, Segment
from lightning_dcp.stability.expected import work_parts
from lightning_dcp.stability.governor import Governor
from lightning_dcp.stability.record import Event, RankTime, StepRecord
from lightning_dcp.stability.settings import AlarmSettings

COST, BUDGET = preset("h100"), BoundaryBudget(dense_limit=16000)
STEPS = 60


def samples() -> Iterator[tuple[int, SampleSegments]]:
    """Long samples with one dense segment each, which one rank holds alone."""
    draw = random.Random(0)
    while True:
        length, tokens = draw.randint(40000, 60000), draw.randint(8000, 12000)
        start = draw.randint(0, length // 2)
        yield length, (Segment(start, start + tokens, "tool", 2.0),)


def busy_seconds(layout: PackLayout, segments: SampleSegments, dense_cost: float) -> list[float]:
    """What sound ranks need where a dense token costs so much more than another."""
    loads = shard_loads(layout, pieces_of(layout.lengths, [segments], BUDGET), Work(COST.linear, COST.attention))
    return [
        COST.pack_overhead
        + math.fsum(
            COST.linear * (1 + dense_cost * p.dense) * p.num_tokens + COST.attention * (p.end**2 - p.start**2)
            for p in load.parts
        )
        for load in loads
    ]


def events(name: str, dense_cost: float, slow: Mapping[int, float]) -> list[Event]:
    governor, told, given = Governor(AlarmSettings(), RingOrders.by_rank(4)), list[Event](), samples()
    draw = random.Random(1)
    for step in range(STEPS):
        length, segments = next(given)
        plan = StepPlan(4, 16384, (length,), ((Pack(0, 4, (0,), name),),), extra={"cost_model": COST.to_dict()})
        layouts = pack_layouts(plan, [segments], BUDGET, COST)
        sound = busy_seconds(layouts[0], segments, dense_cost)
        parts = work_parts(plan, layouts if name in ("budgeted", "greedy") else (), [segments])
        ranks = tuple(
            RankTime(r, s * slow.get(r, 1.0) * draw.uniform(1, 1.05), 0.0, 0.0, math.fsum(parts[r]), 0, parts[r])
            for r, s in enumerate(sound)
        )
        told += governor.decide(StepRecord(step, max(sound), length, None, ranks, ())).events
    return told


@pytest.mark.parametrize(
    ("name", "dense_cost"),
    [
        ("zigzag", 1.0),
        ("greedy", 0.0),
        ("greedy", 1.0),
        ("contiguous", 0.0),
        ("contiguous", 1.0),
        ("budgeted", 0.0),
        ("budgeted", 1.0),
    ],
)
def test_sound_ranks_raise_no_alarm(name: str, dense_cost: float) -> None:
    assert events(name, dense_cost, {}) == []


@pytest.mark.parametrize(
    ("name", "dense_cost", "rank"), [("contiguous", 0.0, 0), ("contiguous", 0.0, 3), ("budgeted", 1.0, 1)]
)
def test_a_slow_rank_alone_is_told(name: str, dense_cost: float, rank: int) -> None:
    alarms = [event for event in events(name, dense_cost, {rank: 1.8}) if event.kind == "alarm"]
    assert {event.subject for event in alarms} == {f"rank {rank}"}
    assert alarms[0].slowdown == pytest.approx(1.8, rel=0.15)
