"""The dynamic scheduler: each sample gets its own CP size, and the whole batch is planned at once."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property
from typing import Any

from lightning_dcp.errors import PlanError, Problem, raise_problems
from lightning_dcp.schedule.alignment import NO_ALIGNMENT, Alignment
from lightning_dcp.schedule.bound import lower_bound_s
from lightning_dcp.schedule.cost import CostModel
from lightning_dcp.schedule.free import plan_free
from lightning_dcp.schedule.hardware import preset
from lightning_dcp.schedule.lockstep import in_place, plan_lockstep
from lightning_dcp.schedule.placement import packed
from lightning_dcp.schedule.plan import MicroBatch, Mode, StepPlan, check_lengths, in_rounds
from lightning_dcp.schedule.simulate import simulate
from lightning_dcp.schedule.sizes import allowed_sizes, size_chains, size_problems
from lightning_dcp.schedule.static import StaticScheduler
from lightning_dcp.schedule.workload import Workload

SHORTEST_S, LONGEST_S = 1e-30, 1e30
"""A step that takes less or more than this comes from a cost model that is wrong, and would leave floats no room."""


@dataclass(frozen=True)
class DynamicScheduler:
    """Plans a batch so that the predicted step takes little more than its lower bound.

    Free-running ranks are balanced over the whole step (:mod:`lightning_dcp.schedule.free`), ranks in lock-step within
    each micro-batch (:mod:`lightning_dcp.schedule.lockstep`). The same lengths give the same plan on every rank and
    machine. What the plan was made for is in its ``extra``: ``cost_model``, ``predicted_step_s``, ``lower_bound_s``.

    Attributes:
        ranks: size of the plane.
        max_seqlen_per_dp_cp_rank: most tokens a rank may hold of one micro-batch.
        cost: what packs cost; by default those of a 7B model on H100s.
        layout: layout of every pack.
        mode: ``free``, or ``lockstep`` for pipelines, experts and sharded weights, whose ranks meet in every micro-batch.
        min_context_parallel_size: smallest CP size used.
        max_context_parallel_size: largest CP size used; ``None``: the whole plane.
        ranks_per_node: ranks of the plane in one node: groups stay inside a node where they can, and those that cannot
            pay for it; ``None``: what the cost model says.
        microbatch_multiple: in lock-step the number of micro-batches is a multiple of this (virtual pipelines need it).
        rank_speeds: speed of each rank of the plane, 1.0 being the cost model's: a slow rank gets less work.
        alignment: the padding that samples and packs get, which counts as tokens, and costs time like them.

    Raises:
        ConfigurationError: all bad settings at once.
    """

    ranks: int
    max_seqlen_per_dp_cp_rank: int
    cost: CostModel = field(default_factory=lambda: preset("h100"))
    layout: str = "zigzag"
    _: KW_ONLY
    mode: Mode = "free"
    min_context_parallel_size: int = 1
    max_context_parallel_size: int | None = None
    ranks_per_node: int | None = None
    microbatch_multiple: int = 1
    rank_speeds: tuple[float, ...] | None = None
    alignment: Alignment = NO_ALIGNMENT

    def __post_init__(self) -> None:
        raise_problems(option_problems(self))
        if self.rank_speeds is not None:
            object.__setattr__(self, "rank_speeds", tuple(float(speed) for speed in self.rank_speeds))
        if self.ranks_per_node is not None:
            object.__setattr__(self, "cost", replace(self.cost, ranks_per_node=self.ranks_per_node))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The CP sizes that may be used, ascending."""
        nodes = self.cost.ranks_per_node
        return allowed_sizes(self.ranks, self.min_context_parallel_size, self.max_context_parallel_size, nodes)

    def schedule(self, lengths: Sequence[int]) -> StepPlan:
        """Plan a batch.

        Raises:
            PlanError: an empty batch or sample; in lock-step a batch with too few samples for every rank to have one.
            SampleTooLongError: a sample that the largest group cannot hold.
        """
        tokens = check_lengths(lengths, self.sizes[-1], self.alignment.limit(self.max_seqlen_per_dp_cp_rank))
        bound = self._bound(tokens, self.sizes)
        if not SHORTEST_S < bound < LONGEST_S:
            raise PlanError(f"the cost model predicts a step of {bound:g} s or more: its numbers cannot be right")
        make = self._lockstep if self.mode == "lockstep" else self._free
        seconds, plan = min((make(tokens, chain, bound) for chain in size_chains(self.sizes)), key=lambda made: made[0])
        seconds, plan = min([(seconds, plan), *self._static(tokens, seconds)], key=lambda made: made[0])
        if not math.isfinite(seconds):
            raise PlanError(self._too_few(len(tokens)))
        extra = {"cost_model": self.cost.to_dict(), "predicted_step_s": seconds, "lower_bound_s": bound}
        return replace(plan, extra=extra)

    def _bound(self, tokens: Sequence[int], sizes: tuple[int, ...]) -> float:
        """Seconds that no plan at these sizes can beat."""
        limit, speeds = self.max_seqlen_per_dp_cp_rank, self.rank_speeds
        return lower_bound_s(
            tokens, self.ranks, limit, self.cost, sizes=sizes, mode=self.mode, speeds=speeds, alignment=self.alignment
        )

    def _too_few(self, samples: int) -> str:
        largest, multiple = self.sizes[-1], self.microbatch_multiple
        rounds = "every micro-batch" if multiple == 1 else f"each of {multiple} or more micro-batches"
        return (
            f"{samples} sample(s) cannot give all {self.ranks} ranks a pack in {rounds}, as lock-step needs it, in groups "
            f"of at most {largest} rank(s): use larger batches, or raise max_context_parallel_size"
        )

    def _workload(self, tokens: Sequence[int], chain: tuple[int, ...]) -> Workload:
        limit = self.max_seqlen_per_dp_cp_rank
        return Workload(tokens, self.ranks, limit, self.cost, chain, self.rank_speeds, self.alignment)

    def _plan(self, tokens: Sequence[int], rounds: tuple[MicroBatch, ...]) -> StepPlan:
        limit = self.max_seqlen_per_dp_cp_rank
        return StepPlan(self.ranks, limit, tuple(tokens), rounds, self.mode, alignment=self.alignment)

    def _free(self, tokens: Sequence[int], chain: tuple[int, ...], bound: float) -> tuple[float, StepPlan]:
        load = self._workload(tokens, chain)
        seconds, packs = packed(load, plan_free(load, bound), self.layout)
        return seconds, self._plan(tokens, in_rounds(packs, self.ranks))

    def _lockstep(self, tokens: Sequence[int], chain: tuple[int, ...], bound: float) -> tuple[float, StepPlan]:
        load = self._workload(tokens, chain)
        found = plan_lockstep(load, bound, self.microbatch_multiple)
        seconds, rounds = (math.inf, ()) if found is None else in_place(load, found.rounds, self.layout)
        return seconds, self._plan(tokens, rounds)

    def _work_s(self, tokens: Sequence[int], c: int) -> float:
        """Compute of all samples at one size over all ranks: less than any step at that size, and quick to tell."""
        rank_seconds = self.cost.linear * sum(tokens) + c * math.fsum(self.cost.attention_seconds(tokens, c).tolist())
        return rank_seconds / math.fsum(self.rank_speeds or (1.0,) * self.ranks)

    def _static(self, tokens: Sequence[int], below: float) -> Iterator[tuple[float, StepPlan]]:
        """Plans at one fixed size, as far as one could take less time than ``below``."""
        limit, longest = self.max_seqlen_per_dp_cp_rank, max(tokens)
        options: Any = {"microbatch_multiple": self.microbatch_multiple, "alignment": self.alignment}
        for c in self.sizes:
            if longest > c * self.alignment.limit(limit) or self._work_s(tokens, c) >= below:
                continue
            if self._bound(tokens, (c,)) >= below:
                continue
            scheduler = StaticScheduler(self.ranks, limit, c, self.layout, self.mode, **options)
            try:
                plan = scheduler.schedule(tokens)
            except PlanError:  # too few samples for every group
                continue
            yield simulate(plan, self.cost, self.rank_speeds).step_s, plan


def option_problems(scheduler: DynamicScheduler) -> list[Problem]:
    """What is wrong with a scheduler's settings."""
    problems = []
    for name in ("ranks", "max_seqlen_per_dp_cp_rank", "microbatch_multiple", "ranks_per_node"):
        value = getattr(scheduler, name)
        if not _is_count(value) and not (name == "ranks_per_node" and value is None):
            problems.append(Problem(f"{name}={value!r}", "not a positive whole number", f"give {name} of 1 or more"))
    if not isinstance(scheduler.cost, CostModel):
        remedy = "give a CostModel, for example load_cost_model('h100')"
        problems.append(Problem(f"cost={scheduler.cost!r}", f"a {type(scheduler.cost).__name__}", remedy))
    multiple = scheduler.microbatch_multiple
    if scheduler.mode not in ("free", "lockstep"):
        problems.append(Problem(f"mode={scheduler.mode!r}", "an unknown mode", "use 'free' or 'lockstep'"))
    elif scheduler.mode == "free" and _is_count(multiple) and multiple > 1:
        found = "free-running ranks, which share no micro-batches"
        problems.append(Problem(f"microbatch_multiple={multiple}", found, "use mode='lockstep'"))
    if not isinstance(scheduler.alignment, Alignment):
        remedy = "give an Alignment, for example Alignment.fp8()"
        problems.append(
            Problem(f"alignment={scheduler.alignment!r}", f"a {type(scheduler.alignment).__name__}", remedy)
        )
    elif _is_count(scheduler.max_seqlen_per_dp_cp_rank):
        problems += scheduler.alignment.problems(scheduler.max_seqlen_per_dp_cp_rank)
    if _is_count(scheduler.ranks):
        limits = scheduler.min_context_parallel_size, scheduler.max_context_parallel_size
        problems += size_problems(scheduler.ranks, *limits)
        problems += speed_problems(scheduler.ranks, scheduler.rank_speeds)
    return problems


def speed_problems(ranks: int, speeds: Any) -> list[Problem]:
    """What is wrong with the speeds of ranks."""
    if speeds is None:
        return []
    good = isinstance(speeds, list | tuple) and len(speeds) == ranks and all(_is_speed(speed) for speed in speeds)
    if good:
        return []
    asked, found = f"rank_speeds={speeds!r}", f"not one positive finite number for each of {ranks} ranks"
    return [Problem(asked, found, "give 1.0 to a rank of the usual speed, 0.5 to one half as fast")]


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_speed(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= sys.float_info.max
