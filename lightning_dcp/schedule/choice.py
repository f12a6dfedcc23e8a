"""Which scheduler plans a run: what a user asked for, what is wrong with it, and the scheduler made of it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from lightning_dcp.errors import ConfigurationError, Problem
from lightning_dcp.schedule.alignment import NO_ALIGNMENT, Alignment
from lightning_dcp.schedule.cost import CostModel
from lightning_dcp.schedule.dynamic import DynamicScheduler
from lightning_dcp.schedule.megatron import MegatronScheduler, megatron_problems
from lightning_dcp.schedule.plan import Mode, Scheduler, divisors
from lightning_dcp.schedule.sizes import allowed_sizes, size_problems
from lightning_dcp.schedule.static import StaticScheduler

SchedulerName = Literal["dynamic", "static", "megatron"]
SchedulerLike = Scheduler | Callable[[int], Scheduler]
"""A scheduler of the user's own, or a function (or class) from the plane's ranks to one."""

DEFAULTS: dict[str, Any] = {
    "schedule_mode": "free",
    "microbatch_multiple": 1,
    "min_context_parallel_size": 1,
    "max_context_parallel_size": None,
    "ranks_per_node": None,
    "rank_speeds": None,
    "layout": "zigzag",
}
"""Options that not every scheduler has, with the values that mean "not given"."""

_OPTIONS: dict[str, tuple[str, ...]] = {
    "dynamic": tuple(DEFAULTS),
    "static": ("schedule_mode", "microbatch_multiple", "layout"),
    "megatron": ("layout",),
    "own": (),
}


@dataclass(frozen=True)
class SchedulerChoice:
    """What was asked for; the attributes are arguments of :class:`~lightning_dcp.DCPStrategy`, described there."""

    scheduler: SchedulerName | SchedulerLike | None
    dynamic_context_parallel: bool
    context_parallel_size: int
    max_seqlen_per_dp_cp_rank: int
    cost_model: CostModel
    layout: str = "zigzag"
    schedule_mode: Mode = "free"
    min_context_parallel_size: int = 1
    max_context_parallel_size: int | None = None
    microbatch_multiple: int = 1
    ranks_per_node: int | None = None
    rank_speeds: tuple[float, ...] | None = None

    @property
    def kind(self) -> str:
        """``dynamic``, ``static``, ``megatron``, or ``own`` for a scheduler of the user's."""
        if self.scheduler is None:
            return "dynamic" if self.dynamic_context_parallel else "static"
        return self.scheduler if isinstance(self.scheduler, str) else "own"

    @property
    def name(self) -> str:
        """The scheduler, in words."""
        named = {"megatron": "by Megatron-Core's scheduler", "own": f"by {_name(self.scheduler)}"}
        return named.get(self.kind, self.kind)

    @property
    def settings(self) -> str:
        """The options of every scheduler that has them, in words."""
        values = {"layout": self.layout, "mode": self.schedule_mode}
        own = {"megatron": ("layout",), "own": ()}.get(self.kind, tuple(values))
        return ", ".join(f"{name} {values[name]}" for name in own) or "layout and mode its own"

    # ---------------------------------------------------------- what is wrong

    def argument_problems(self) -> list[Problem]:
        """What is wrong whatever the machine is."""
        problems = [*_value_problems(self), *_scheduler_problems(self.scheduler)]
        if problems:
            return problems
        if not self.dynamic_context_parallel and self.kind != "static":
            problems.append(
                Problem(
                    f"dynamic_context_parallel=False with scheduler={_name(self.scheduler)}",
                    "a static baseline that another scheduler would plan",
                    "leave one of the two out",
                )
            )
        problems += [self._foreign(name) for name in DEFAULTS if name not in _OPTIONS[self.kind] and self._given(name)]
        if not problems and self.microbatch_multiple > 1 and self.schedule_mode == "free":
            problems.append(
                Problem(
                    f"microbatch_multiple={self.microbatch_multiple}",
                    "schedule_mode='free', where each rank has its own number of micro-batches",
                    "use schedule_mode='lockstep', or leave microbatch_multiple out",
                )
            )
        return problems

    def _given(self, name: str) -> bool:
        return bool(getattr(self, name) != DEFAULTS[name])

    def _foreign(self, name: str) -> Problem:
        scheduler = {"own": f"the scheduler {_name(self.scheduler)}, which decides alone"}.get(
            self.kind, f"the {self.kind} scheduler, which has no such option"
        )
        users = [kind for kind, options in _OPTIONS.items() if name in options]
        remedy = f"leave {name} out, or use scheduler={' or '.join(map(repr, users))}"
        return Problem(f"{name}={getattr(self, name)!r}", scheduler, remedy)

    def plane_problems(self, ranks: int) -> list[Problem]:
        """What is wrong on a plane of this many ranks."""
        if self.kind == "static" and self.context_parallel_size not in divisors(ranks):
            found, sizes = f"a DPxCP plane of {ranks} rank(s)", ", ".join(map(str, divisors(ranks)))
            return [Problem(f"context_parallel_size={self.context_parallel_size}", found, f"use one of {sizes}")]
        if self.kind == "megatron":
            return megatron_problems(ranks)
        if self.kind != "dynamic":
            return []
        problems = size_problems(ranks, self.min_context_parallel_size, self.max_context_parallel_size)
        if self.rank_speeds is not None and len(self.rank_speeds) != ranks:
            problems.append(
                Problem(
                    f"rank_speeds of {len(self.rank_speeds)} rank(s)",
                    f"a DPxCP plane of {ranks} rank(s)",
                    "give one speed for each rank of the plane, in the order of the ranks",
                )
            )
        return problems

    # -------------------------------------------------------------- the result

    def sizes(self, ranks: int, nodes: int | None = None) -> tuple[int, ...]:
        """The CP sizes that plans may use, ascending.

        Args:
            ranks: of the plane.
            nodes: ranks of the plane in one node, if neither the option nor the cost model says so.
        """
        if self.kind == "static":
            return (self.context_parallel_size,)
        if self.kind != "dynamic":
            return allowed_sizes(ranks)
        limits = self.min_context_parallel_size, self.max_context_parallel_size
        return allowed_sizes(ranks, *limits, self.nodes_in_force(nodes))

    def build(self, ranks: int, nodes: int | None = None, alignment: Alignment = NO_ALIGNMENT) -> Scheduler:
        """The scheduler; arguments as in :meth:`sizes`.

        Args:
            ranks: of the plane.
            nodes: ranks of the plane in one node, if neither the option nor the cost model says so.
            alignment: the padding that samples and packs get. A scheduler of the user's own is not told: its plans are
                checked.

        Raises:
            ConfigurationError: a function of the user's that makes no scheduler, or a scheduler that cannot be had here.
        """
        limit = self.max_seqlen_per_dp_cp_rank
        if self.kind == "own":
            return _made(self.scheduler, ranks)
        if self.kind == "static":
            options: Any = {"microbatch_multiple": self.microbatch_multiple, "alignment": alignment}
            return StaticScheduler(ranks, limit, self.context_parallel_size, self.layout, self.schedule_mode, **options)
        if self.kind == "megatron":
            return MegatronScheduler(ranks, limit, layout=self.layout, alignment=alignment)
        return DynamicScheduler(
            ranks,
            limit,
            cost=self.cost_model,
            layout=self.layout,
            mode=self.schedule_mode,
            min_context_parallel_size=self.min_context_parallel_size,
            max_context_parallel_size=self.max_context_parallel_size,
            ranks_per_node=self.nodes_in_force(nodes),
            microbatch_multiple=self.microbatch_multiple,
            rank_speeds=self.rank_speeds,
            alignment=alignment,
        )

    def nodes_in_force(self, nodes: int | None) -> int | None:
        """Ranks of the plane in one node: as the option says, else the cost model, else ``nodes``."""
        return self.ranks_per_node or self.cost_model.ranks_per_node or nodes


def _made(scheduler: Any, ranks: int) -> Scheduler:
    """The user's scheduler itself, or what their function or class makes for a plane of this many ranks."""
    if _schedules(scheduler):
        return scheduler
    made = scheduler(ranks)
    if not _schedules(made):
        found = f"{type(made).__name__}, which has no schedule(lengths)"
        remedy = "return an object with schedule(lengths) -> StepPlan"
        raise ConfigurationError([Problem(f"scheduler={_name(scheduler)}, called with {ranks} rank(s)", found, remedy)])
    return made


def _schedules(scheduler: object) -> bool:
    return not isinstance(scheduler, type) and callable(getattr(scheduler, "schedule", None))


def _scheduler_problems(scheduler: object) -> list[Problem]:
    names = get_args(SchedulerName)
    if scheduler is None or scheduler in names or (not isinstance(scheduler, str) and _usable(scheduler)):
        return []
    remedy = f"use one of {list(names)}, an object with schedule(lengths), or a function from the plane's ranks to one"
    return [Problem(f"scheduler={scheduler!r}", "no scheduler", remedy)]


def _usable(scheduler: object) -> bool:
    return _schedules(scheduler) or callable(scheduler)


def _value_problems(choice: SchedulerChoice) -> list[Problem]:
    problems = []
    for name in ("min_context_parallel_size", "max_context_parallel_size", "microbatch_multiple", "ranks_per_node"):
        value = getattr(choice, name)
        if value is not DEFAULTS[name] and not _is_count(value):
            problems.append(Problem(f"{name}={value!r}", "not a positive whole number", f"give {name} of 1 or more"))
    if choice.rank_speeds is not None and not isinstance(choice.rank_speeds, tuple):
        found, remedy = f"a {type(choice.rank_speeds).__name__}", "give a list of one number a rank"
        return [*problems, Problem(f"rank_speeds={choice.rank_speeds!r}", found, remedy)]
    modes = get_args(Mode)
    if choice.schedule_mode not in modes:
        problems.append(Problem(f"schedule_mode={choice.schedule_mode!r}", "unknown", f"use one of {list(modes)}"))
    if choice.rank_speeds is not None and not all(map(_is_speed, choice.rank_speeds)):
        found = "not finite numbers above 0 only"
        remedy = "give one number a rank, such as 1.0 for a full share of work and 0.5 for half of it"
        problems.append(Problem(f"rank_speeds={list(choice.rank_speeds)}", found, remedy))
    return problems


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_speed(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= sys.float_info.max


def _name(scheduler: object) -> str:
    """A short name for a message: ``'static'``, or the class or function of the user's."""
    if isinstance(scheduler, str):
        return repr(scheduler)
    return str(getattr(scheduler, "__name__", type(scheduler).__name__))
