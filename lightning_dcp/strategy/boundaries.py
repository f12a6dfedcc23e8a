"""Budgets of shards in a strategy: what is asked for, what is wrong with it, and how plans are laid out by it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args

from lightning_dcp.boundaries.budget import DEFAULT_BUDGET, BoundaryBudget
from lightning_dcp.boundaries.settle import OnViolation, Settled, settle
from lightning_dcp.errors import Problem
from lightning_dcp.parallel.layout import BUDGETED
from lightning_dcp.parallel.ring_orders import RingOrders
from lightning_dcp.schedule.choice import SchedulerChoice
from lightning_dcp.schedule.plan import Pack, StepPlan
from lightning_dcp.step.ahead import Samples


@dataclass(frozen=True)
class BoundaryChoice:
    """What was asked for; the attributes are arguments of :class:`~lightning_dcp.DCPStrategy`, described there."""

    layout: str
    budget: BoundaryBudget | None
    on_violation: OnViolation

    @property
    def in_force(self) -> BoundaryBudget | None:
        """The budget that shards are held to; None: shards are not looked at."""
        return DEFAULT_BUDGET if self.budget is None and self.layout == BUDGETED else self.budget

    def limit(self, max_seqlen_per_dp_cp_rank: Any) -> Any:
        """Tokens that plans may give a rank: so few that they keep the budget."""
        own = self.budget.max_tokens if isinstance(self.budget, BoundaryBudget) else None
        if own is None or not isinstance(max_seqlen_per_dp_cp_rank, int):  # what is no number is refused elsewhere
            return max_seqlen_per_dp_cp_rank
        return min(own, max_seqlen_per_dp_cp_rank)

    def problems(self) -> list[Problem]:
        """What is wrong whatever the machine is."""
        problems, ways = [], get_args(OnViolation)
        if self.budget is not None and not isinstance(self.budget, BoundaryBudget):
            remedy = "give a lightning_dcp.BoundaryBudget(max_tokens=..., dense_limit=...)"
            problems.append(Problem(f"boundary_budget={self.budget!r}", f"a {type(self.budget).__name__}", remedy))
        if not isinstance(self.on_violation, str) or self.on_violation not in ways:
            problems.append(
                Problem(f"on_violation={self.on_violation!r}", "an unknown value", f"use one of {list(ways)}")
            )
        elif self.on_violation != "warn" and self.in_force is None:
            remedy = "give boundary_budget=BoundaryBudget(...), or leave on_violation out"
            problems.append(Problem(f"on_violation={self.on_violation!r}", "no budget that could be broken", remedy))
        return problems


@dataclass(frozen=True)
class PlanSettler:
    """Lays out the packs of plans under a budget; the same on all ranks, and in whatever thread it runs.

    Attributes:
        boundaries: budget, and what is done about shards that break it.
        choice: of the scheduler, for plans in place of those whose shards break the budget.
        ranks: of the plane.
        nodes: ranks of the plane in one node, if nobody said so.
        orders: ring orders in force: dense shards go to the ranks whose keys take the short way.
    """

    boundaries: BoundaryChoice
    choice: SchedulerChoice
    ranks: int
    nodes: int | None
    orders: RingOrders

    def __call__(self, plan: StepPlan, samples: Samples) -> Settled:
        """The plan with the layouts of its packs."""
        budget = self.boundaries.in_force
        if budget is None:
            return Settled(plan)
        return settle(
            plan,
            samples.lengths,
            samples.segments,
            budget,
            self.choice.cost_model,
            self.boundaries.on_violation,
            sample_ids=samples.ids,
            sizes=self.choice.sizes(self.ranks, self.nodes),
            microbatch_multiple=self.choice.microbatch_multiple,
            speeds=self.choice.rank_speeds,
            preferred=None if self.orders.is_by_rank else self._preferred,
            ring=None if self.orders.is_by_rank else self._ring,
        )

    def _ring(self, pack: Pack) -> tuple[int, ...]:
        """The places of a pack's group in ring order."""
        return self.orders.for_group(pack.first_rank, pack.cp_size)

    def _preferred(self, pack: Pack) -> tuple[int, ...]:
        """Places of a pack's group; first those whose keys do not travel over its slowest hop."""
        return self.orders.shortest_way(pack.first_rank, pack.cp_size)
