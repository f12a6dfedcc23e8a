"""The same batches planned statically and dynamically, side by side."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from lightning_dcp.errors import PlanError, Problem
from lightning_dcp.schedule.bound import lower_bound_s
from lightning_dcp.schedule.cost import CostModel
from lightning_dcp.schedule.dynamic import DynamicScheduler
from lightning_dcp.schedule.plan import Mode, Scheduler, StepPlan, divisors
from lightning_dcp.schedule.sizes import allowed_sizes, size_problems
from lightning_dcp.schedule.static import StaticScheduler
from lightning_dcp.schedule.summary import PlanSummary, mean_summary, summarize

SchedulerName = Literal["dynamic", "megatron"]
Lengths = Sequence[int]


@dataclass(frozen=True)
class Setting:
    """What plans are made for; which scheduler is compared with the static one.

    Attributes:
        ranks: size of the plane.
        max_seqlen_per_dp_cp_rank: most tokens a rank may hold of one micro-batch.
        cost: what packs cost; knows the ranks of a node.
        scheduler: ``dynamic``, or ``megatron``: the one of the Megatron-Core that is installed.
        mode: ``free`` or ``lockstep``, for both.
        min_context_parallel_size: smallest group of the dynamic scheduler.
        max_context_parallel_size: its largest; ``None``: the plane.
        microbatch_multiple: the number of micro-batches is a multiple of this (lock-step), for both.
    """

    ranks: int
    max_seqlen_per_dp_cp_rank: int
    cost: CostModel
    scheduler: SchedulerName = "dynamic"
    mode: Mode = "free"
    min_context_parallel_size: int = 1
    max_context_parallel_size: int | None = None
    microbatch_multiple: int = 1

    def problems(self) -> list[Problem]:
        """What is wrong with it."""
        named = {"ranks": self.ranks, "max-seqlen-per-dp-cp-rank": self.max_seqlen_per_dp_cp_rank}
        problems = [
            Problem(f"--{name} {value}", "a number below 1", "give at least 1")
            for name, value in named.items()
            if value < 1
        ]
        if self.microbatch_multiple < 1 or (self.microbatch_multiple > 1 and self.mode != "lockstep"):
            found = f"--mode {self.mode}" if self.microbatch_multiple > 1 else "a number below 1"
            remedy = "use it with --mode lockstep, or leave it out"
            problems.append(Problem(f"--microbatch-multiple {self.microbatch_multiple}", found, remedy))
        if self.scheduler == "megatron":
            return problems + self._options_of_dynamic()
        if self.ranks >= 1:
            problems += size_problems(self.ranks, self.min_context_parallel_size, self.max_context_parallel_size)
        return problems

    def _options_of_dynamic(self) -> list[Problem]:
        given = {
            "min-context-parallel-size": (self.min_context_parallel_size, 1),
            "max-context-parallel-size": (self.max_context_parallel_size, None),
            "microbatch-multiple": (self.microbatch_multiple, 1),
        }
        return [
            Problem(f"--{name} {value}", "--scheduler megatron, which has no such option", "leave it out")
            for name, (value, default) in given.items()
            if value != default
        ]

    @property
    def sizes(self) -> tuple[int, ...]:
        """CP sizes that the compared scheduler may use."""
        if self.scheduler == "megatron":
            return divisors(self.ranks)
        nodes = self.cost.ranks_per_node
        return allowed_sizes(self.ranks, self.min_context_parallel_size, self.max_context_parallel_size, nodes)

    def compared(self) -> Scheduler:
        """The scheduler that is compared with the static one."""
        ranks, limit = self.ranks, self.max_seqlen_per_dp_cp_rank
        if self.scheduler == "megatron":
            from lightning_dcp.schedule.megatron import MegatronScheduler

            return _InMode(MegatronScheduler(ranks, limit), self.mode)
        return DynamicScheduler(
            ranks,
            limit,
            cost=self.cost,
            mode=self.mode,
            min_context_parallel_size=self.min_context_parallel_size,
            max_context_parallel_size=self.max_context_parallel_size,
            microbatch_multiple=self.microbatch_multiple,
        )

    def static(self, context_parallel_size: int) -> Scheduler:
        """The static scheduler at this size."""
        return StaticScheduler(
            self.ranks,
            self.max_seqlen_per_dp_cp_rank,
            context_parallel_size,
            mode=self.mode,
            microbatch_multiple=self.microbatch_multiple,
        )

    def smallest_static(self, longest: int) -> int:
        """The smallest CP size whose groups hold the longest sample, or the whole plane if none does."""
        limit = self.max_seqlen_per_dp_cp_rank
        return next((c for c in divisors(self.ranks) if c * limit >= longest), self.ranks)

    def lower_bound_s(self, lengths: Lengths, *, with_size: int) -> float:
        """Seconds that no plan of this batch can beat, of the compared scheduler or of static CP ``with_size``."""
        sizes = sorted({*self.sizes, with_size})
        return lower_bound_s(
            lengths, self.ranks, self.max_seqlen_per_dp_cp_rank, self.cost, sizes=sizes, mode=self.mode
        )


@dataclass(frozen=True)
class _InMode:
    """Megatron-Core's plans, run in a given mode."""

    scheduler: Scheduler
    mode: Mode

    def schedule(self, lengths: Lengths) -> StepPlan:
        plan = replace(self.scheduler.schedule(lengths), mode=self.mode)
        try:
            plan.validate()
        except PlanError as error:
            raise PlanError(f"Megatron-Core's plan cannot run with --mode {self.mode}: {error}") from None
        return plan


@dataclass(frozen=True)
class PlannedBatch:
    """One batch, planned in both ways.

    Attributes:
        static: the static plan.
        dynamic: that of the compared scheduler.
        static_summary: numbers of the static plan.
        dynamic_summary: numbers of the other.
    """

    static: StepPlan
    dynamic: StepPlan
    static_summary: PlanSummary
    dynamic_summary: PlanSummary

    @property
    def speedup(self) -> float:
        """Static step time over dynamic step time."""
        return self.static_summary.predicted_step_s / self.dynamic_summary.predicted_step_s


@dataclass(frozen=True)
class Comparison:
    """All batches, planned in both ways.

    Attributes:
        setting: what they were planned for.
        context_parallel_size: of the static plans.
        batches: the plans.
    """

    setting: Setting
    context_parallel_size: int
    batches: tuple[PlannedBatch, ...]

    @cached_property
    def static(self) -> PlanSummary:
        """Mean over the static plans."""
        return mean_summary([batch.static_summary for batch in self.batches])

    @cached_property
    def dynamic(self) -> PlanSummary:
        """Mean over the plans of the compared scheduler."""
        return mean_summary([batch.dynamic_summary for batch in self.batches])

    @property
    def speedup(self) -> float:
        """Time of all static steps over time of all dynamic ones."""
        return self.static.predicted_step_s / self.dynamic.predicted_step_s

    @property
    def median(self) -> int:
        """Number of the batch with the median speed-up, which stands for all: the lower one of two."""
        order = sorted(range(len(self.batches)), key=lambda i: (self.batches[i].speedup, i))
        return order[(len(order) - 1) // 2]

    def to_dict(self) -> dict[str, Any]:
        """The numbers as plain values for JSON."""
        return {
            "context_parallel_size": self.context_parallel_size,
            "batches": len(self.batches),
            "batch_shown": self.median,
            "speedup": self.speedup,
            "static": self.static.to_dict(),
            self.setting.scheduler: self.dynamic.to_dict(),
        }


def compare(setting: Setting, batches: Sequence[Lengths], context_parallel_size: int) -> Comparison:
    """Plan every batch in both ways.

    Args:
        setting: what to plan for.
        batches: tokens of each sample, one sequence a batch.
        context_parallel_size: ranks of every group of the static plans.

    Raises:
        PlanError: a batch that cannot be planned.
        ConfigurationError: bad options of the scheduler.
    """
    static, dynamic = setting.static(context_parallel_size), setting.compared()
    planned = []
    for lengths in batches:
        bound = setting.lower_bound_s(lengths, with_size=context_parallel_size)
        try:
            planned_statically = _planned(static, lengths, setting.cost, bound)
        except PlanError as error:
            remedy = "--context-parallel-size compares with another size"
            raise PlanError(f"static CP {context_parallel_size} cannot plan this batch: {error}; {remedy}") from None
        plans = [planned_statically, _planned(dynamic, lengths, setting.cost, bound)]
        (static_plan, static_summary), (dynamic_plan, dynamic_summary) = plans
        planned.append(PlannedBatch(static_plan, dynamic_plan, static_summary, dynamic_summary))
    return Comparison(setting, context_parallel_size, tuple(planned))


def _planned(scheduler: Scheduler, lengths: Lengths, cost: CostModel, bound: float) -> tuple[StepPlan, PlanSummary]:
    start = time.perf_counter()
    plan = scheduler.schedule(lengths)
    seconds = time.perf_counter() - start
    extra = {"cost_model": cost.to_dict(), "lower_bound_s": bound}
    summary = summarize(plan, cost, lower_bound_s=bound, planning_s=seconds)
    return replace(plan, extra=plan.extra | extra | {"predicted_step_s": summary.predicted_step_s}), summary
