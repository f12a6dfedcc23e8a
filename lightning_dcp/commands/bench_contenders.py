"""The schedulers that ``lightning-dcp bench plan`` compares, and what one plan of each is worth."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, get_args

from lightning_dcp.commands.bench_workloads import Size
from lightning_dcp.errors import DCPError
from lightning_dcp.schedule.cost import CostModel
from lightning_dcp.schedule.dynamic import DynamicScheduler
from lightning_dcp.schedule.megatron import MegatronScheduler
from lightning_dcp.schedule.plan import Mode, Scheduler, StepPlan, divisors
from lightning_dcp.schedule.simulate import simulate
from lightning_dcp.schedule.static import StaticScheduler

Peer = Literal["static", "megatron"]
MODES: tuple[Mode, ...] = get_args(Mode)


@dataclass(frozen=True)
class Outcome:
    """One batch, planned for one mode.

    Attributes:
        step_s: predicted seconds of the step; ``None``: the scheduler refused.
        planning_s: seconds that planning took.
        refusal: what the scheduler said when it refused.
    """

    step_s: float | None
    planning_s: float
    refusal: str = ""


Outcomes = dict[Mode, Outcome]
Contender = Callable[[Size, Sequence[int], CostModel], Outcomes]
"""Plans one batch for both modes."""


def plan_dynamic(size: Size, lengths: Sequence[int], cost: CostModel) -> Outcomes:
    """This package's dynamic scheduler, once for each mode."""
    limit = size.max_seqlen_per_dp_cp_rank
    make = partial(DynamicScheduler, size.ranks, limit, cost)
    return {mode: _planned(partial(make, mode=mode), mode, lengths, cost) for mode in MODES}


def plan_static(size: Size, lengths: Sequence[int], cost: CostModel) -> Outcomes:
    """One CP size for the batch: the smallest that holds its longest sample, the best that static CP can do here."""
    limit = size.max_seqlen_per_dp_cp_rank
    c = next(c for c in divisors(size.ranks) if c * limit >= max(lengths))
    make = partial(StaticScheduler, size.ranks, limit, c)
    return {mode: _planned(partial(make, mode=mode), mode, lengths, cost) for mode in MODES}


def plan_megatron(size: Size, lengths: Sequence[int], cost: CostModel) -> Outcomes:
    """The scheduler of the installed Megatron-Core; it makes one plan, whatever the mode.

    Lock-step is how Megatron-Core runs it, with a barrier after each of its rounds.
    """
    start = time.perf_counter()
    try:
        scheduler = MegatronScheduler(size.ranks, size.max_seqlen_per_dp_cp_rank)
        start = time.perf_counter()
        rounds = scheduler.rounds(lengths)
    except DCPError as error:
        return dict.fromkeys(MODES, Outcome(None, time.perf_counter() - start, str(error)))
    planning_s = time.perf_counter() - start
    parts = [tuple((pack,) for pack in packs) for packs in rounds]
    empty = StepPlan(size.ranks, size.max_seqlen_per_dp_cp_rank, tuple(lengths), ())
    whole = replace(empty, microbatches=tuple(microbatch for part in parts for microbatch in part))
    return {
        "free": Outcome(simulate(whole, cost).step_s, planning_s),
        "lockstep": Outcome(sum(simulate(replace(empty, microbatches=p), cost).step_s for p in parts), planning_s),
    }


CONTENDERS: dict[str, Contender] = {"dynamic": plan_dynamic, "static": plan_static, "megatron": plan_megatron}


def _planned(make: Callable[[], Scheduler], mode: Mode, lengths: Sequence[int], cost: CostModel) -> Outcome:
    """Plan, and check that the plan keeps the rules of the mode; the check is not counted as planning."""
    start = time.perf_counter()
    try:
        plan = make().schedule(lengths)
        planning_s = time.perf_counter() - start
        plan = replace(plan, mode=mode)
        plan.validate()
    except DCPError as error:
        return Outcome(None, time.perf_counter() - start, str(error))
    return Outcome(simulate(plan, cost).step_s, planning_s)


PROBE = 512
"""Samples of the batch on which a peer shows its speed before it is given a larger one."""


class PeerLimit:
    """Keeps peers that plan for long from being asked again, or for larger batches.

    The quickest plan of a size counts, since a busy machine makes any of them slow; from the largest size so far,
    planning time is taken to grow with (samples x ranks)^1.2, as that of Megatron-Core's schedulers was seen to.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._quickest: dict[tuple[str, int], float] = {}

    def allows(self, name: str, size: Size) -> bool:
        """Whether a scheduler may be asked; this package's dynamic one always may."""
        return name == "dynamic" or self._expected_s(name, _work(size)) <= self.seconds

    def knows(self, name: str, size: Size) -> bool:
        """Whether a plan of this size or a smaller one was seen."""
        return any(peer == name and seen <= _work(size) for peer, seen in self._quickest)

    def saw(self, name: str, size: Size, seconds: float) -> None:
        """Remember how long a plan took."""
        key = (name, _work(size))
        self._quickest[key] = min(seconds, self._quickest.get(key, seconds))

    def _expected_s(self, name: str, work: int) -> float:
        """Seconds of one plan, from the largest size so far that is no larger; 0 if there is none."""
        smaller = max((seen for peer, seen in self._quickest if peer == name and seen <= work), default=None)
        return 0.0 if smaller is None else self._quickest[name, smaller] * (work / smaller) ** 1.2


def _work(size: Size) -> int:
    return size.ranks * size.samples


def ask(name: str, size: Size, lengths: Sequence[int], cost: CostModel, limit: PeerLimit) -> Outcomes | None:
    """Have one scheduler plan one batch; ``None`` if it would take too long."""
    if name != "dynamic" and size.samples > PROBE and not limit.knows(name, size):
        ask(name, replace(size, samples=PROBE), lengths[:PROBE], cost, limit)
    if not limit.allows(name, size):
        return None
    outcomes = CONTENDERS[name](size, lengths, cost)
    limit.saw(name, size, max(outcome.planning_s for outcome in outcomes.values()))
    return outcomes
