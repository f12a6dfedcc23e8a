"""Steps without a Trainer: real plans, real hops over gloo, and compute that is slept, so that two cores are enough."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from lightning_dcp.attention.engine import context_parallel_attention
from lightning_dcp.parallel.clock import WaitClock
from lightning_dcp.parallel.context import CPContext, make_context
from lightning_dcp.parallel.groups import ParallelGroups
from lightning_dcp.parallel.rank_times import PackShare
from lightning_dcp.parallel.ring_orders import RingOrders
from lightning_dcp.schedule.cost import CostModel
from lightning_dcp.schedule.dynamic import DynamicScheduler
from lightning_dcp.schedule.plan import Pack, StepPlan
from lightning_dcp.stability.expected import work_parts
from lightning_dcp.stability.governor import Governor
from lightning_dcp.stability.record import StepRecord
from lightning_dcp.stability.settings import AlarmSettings
from lightning_dcp.stability.watch import StepWatch
from tests.parallel.support import join_world
from tests.support.planted import Fault, slow_link, slow_rank

COST = CostModel(linear=3e-5, attention=6e-8, pack_overhead=1e-3)
"""What compute takes here; :attr:`Run.cost` is what the scheduler believes."""


@dataclass(frozen=True)
class Run:
    """What is run.

    Attributes:
        steps: how many.
        link: the link that is slow, as ranks of the world.
        rank: the rank that is slow.
        seconds: of the fault, each time.
        first: its first step.
        end: the step after its last.
        fallback: whether anything is done about it.
        cost: what the scheduler believes that packs cost.
        settings: of alarms.
        spans: whether records have packs with intervals.
        seed: of the batches.
        min_cp: smallest CP size.
    """

    steps: int
    link: tuple[int, int] | None = None
    rank: int | None = None
    seconds: float = 0.02
    first: int = 0
    end: int | None = None
    fallback: bool = True
    cost: CostModel = COST
    settings: AlarmSettings = field(default_factory=AlarmSettings)
    spans: bool = False
    seed: int = 1
    min_cp: int = 1


@dataclass
class Outcome:
    """What one rank saw: the records, the digests of what was in force, and its share of the planned work by step."""

    records: list[StepRecord] = field(default_factory=list)
    digests: list[int] = field(default_factory=list)
    plans: list[StepPlan] = field(default_factory=list)


def unequal_batches(seed: int) -> Iterator[list[int]]:
    """Lengths between 4 and 512 tokens, most of them short, and few or many."""
    draw = random.Random(seed)
    while True:
        yield [int(4 * 2 ** draw.uniform(0, 7)) for _ in range(draw.randint(4, 16))]


def watched_steps(run: Run) -> Outcome:
    """A job for ranks."""
    groups, device, outcome = join_world(), torch.device("cpu"), Outcome()
    ranks = len(groups.plane_ranks)
    governor = Governor(run.settings, RingOrders.by_rank(ranks), fallback=run.fallback)
    watch = StepWatch(groups, device, governor, run.settings)
    clock, batches = WaitClock(watch.recorder), unequal_batches(run.seed)
    with ExitStack() as stack:
        faults = _plant(stack, run)
        for step in range(run.steps):
            faults[-1].step = faults[0].step = step
            state = governor.state
            scheduler = DynamicScheduler(
                ranks, 256, run.cost, rank_speeds=state.rank_speeds, min_context_parallel_size=run.min_cp
            )
            plan = scheduler.schedule(next(batches))
            outcome.plans.append(plan)
            outcome.digests.append(state.digest())
            watch.recorder.begin_step()
            _packs(plan, groups, clock, governor, faults[0])
            told: list[Any] = [None] * ranks
            dist.all_gather_object(told, watch.recorder.finish_step(packs=run.spans, spans=run.spans), groups.control)
            outcome.records.append(watch.join(step, plan, told))
            watch.probe()
    return outcome


def _plant(stack: ExitStack, run: Run) -> list[Fault]:
    """The fault of a rank, which may be none, and that of a link if there is one."""
    faults = [stack.enter_context(slow_rank(-1 if run.rank is None else run.rank, seconds=run.seconds))]
    if run.link is not None:
        faults.append(stack.enter_context(slow_link(*run.link, seconds=run.seconds)))
    return [fault.between(run.first, run.end) for fault in faults]


def _packs(plan: StepPlan, groups: ParallelGroups, clock: WaitClock, governor: Governor, fault: Fault) -> None:
    for number, pack in enumerate(plan.packs()):
        if groups.rank in pack.ranks:
            context = context_of(plan, pack, groups, clock, governor)
            share = PackShare(number, pack.first_rank, pack.cp_size, context.num_local_tokens, sample_ids=pack.samples)
            assert clock.recorder is not None
            with clock.recorder.pack(share):
                scheme = governor.state.scheme_for(pack.first_rank, pack.cp_size) or "ring"
                _work(plan, pack, context, scheme, fault)


def context_of(plan: StepPlan, pack: Pack, groups: ParallelGroups, clock: WaitClock, governor: Governor) -> CPContext:
    """The context of a pack, with the ring in force."""
    return make_context(
        groups.cp_group(pack.first_rank, pack.cp_size),
        groups.rank - pack.first_rank,
        [plan.lengths[s] for s in pack.samples],
        clock=clock,
        ring=governor.state.orders.for_group(pack.first_rank, pack.cp_size),
    )


def _work(plan: StepPlan, pack: Pack, context: CPContext, scheme: str, fault: Fault) -> None:
    """Sleep for what the pack computes, and swap keys and values forward and backward."""
    alone = replace(plan, microbatches=((pack,),), extra={"cost_model": COST.to_dict()})
    time.sleep(sum(work_parts(alone)[pack.first_rank]))
    fault.compute()
    q, k, v = (torch.ones(context.num_local_tokens, 1, 8, requires_grad=True) for _ in range(3))
    context_parallel_attention(q, k, v, context, scheme=scheme).sum().backward()


def events(records: Sequence[StepRecord], kind: str | None = None) -> list[tuple[int, str, str]]:
    """Step, kind and subject of each event."""
    return [(e.step, e.kind, e.subject) for r in records for e in r.events if kind in (None, e.kind)]
