"""What ``lightning-dcp audit`` plans and audits batches for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from lightning_dcp.boundaries.budget import BoundaryBudget
from lightning_dcp.boundaries.layouts import GREEDY
from lightning_dcp.errors import Problem
from lightning_dcp.parallel.layout import LAYOUTS
from lightning_dcp.schedule.cost import CostModel
from lightning_dcp.schedule.dynamic import DynamicScheduler
from lightning_dcp.schedule.plan import Mode, Scheduler, divisors
from lightning_dcp.schedule.sizes import allowed_sizes, size_problems
from lightning_dcp.schedule.static import StaticScheduler

LayoutName = Literal["budgeted", "zigzag", "contiguous", "greedy"]


@dataclass(frozen=True)
class AuditSettings:
    """Everything beside the data that decides where packs are cut, and what is safe.

    Attributes:
        cost: what packs cost.
        ranks: of the plane.
        max_seqlen_per_dp_cp_rank: most tokens that a rank may hold of one micro-batch.
        max_tokens: budget of a shard; None: ``max_seqlen_per_dp_cp_rank``.
        dense_limit: most dense tokens of a shard; None: no limit.
        dense_from: density from which on a segment is dense.
        tolerance: how much more work than with zigzag the heaviest rank may have.
        layout: of every pack.
        context_parallel_size: of every pack; None: the dynamic scheduler chooses.
        mode: of the plans.
        min_context_parallel_size: of the dynamic scheduler.
        max_context_parallel_size: of the dynamic scheduler.
        replan: whether packs over their budgets are planned anew, as with ``on_violation="replan"``.
    """

    cost: CostModel
    ranks: int = 8
    max_seqlen_per_dp_cp_rank: int = 8192
    max_tokens: int | None = None
    dense_limit: int | None = None
    dense_from: float = BoundaryBudget.dense_from
    tolerance: float = BoundaryBudget.tolerance
    layout: str = "budgeted"
    context_parallel_size: int | None = None
    mode: Mode = "free"
    min_context_parallel_size: int = 1
    max_context_parallel_size: int | None = None
    replan: bool = False

    def problems(self) -> list[Problem]:
        """What is wrong with numbers that neither the budget nor the cost model checks."""
        problems = [
            Problem(f"--{name.replace('_', '-')} {value}", "a number below 1", "give at least 1")
            for name in ("ranks", "max_seqlen_per_dp_cp_rank")
            if (value := getattr(self, name)) < 1
        ]
        if self.layout not in (*LAYOUTS, GREEDY):
            problems.append(
                Problem(f"--layout {self.layout}", "unknown", f"use one of {', '.join([*LAYOUTS, GREEDY])}")
            )
        if self.ranks >= 1:
            problems += size_problems(self.ranks, self.min_context_parallel_size, self.max_context_parallel_size)
            size = self.context_parallel_size
            if size is not None and size not in divisors(self.ranks):
                remedy = f"use one of {', '.join(map(str, divisors(self.ranks)))}"
                found = f"not a divisor of the plane of {self.ranks} ranks"
                problems.append(Problem(f"--context-parallel-size {size}", found, remedy))
        return problems

    @property
    def budget(self) -> BoundaryBudget:
        """Of each shard."""
        return BoundaryBudget(self.max_tokens, self.dense_limit, self.dense_from, self.tolerance)

    @property
    def sizes(self) -> tuple[int, ...]:
        """CP sizes that plans may use."""
        if self.context_parallel_size is not None:
            return (self.context_parallel_size,)
        limits = self.min_context_parallel_size, self.max_context_parallel_size
        return allowed_sizes(self.ranks, *limits, self.cost.ranks_per_node)

    def scheduler(self) -> Scheduler:
        """Makes the plans, of packs whose tokens keep their budget."""
        limit = self.budget.within(self.max_seqlen_per_dp_cp_rank).max_tokens or 1
        if self.context_parallel_size is not None:
            return StaticScheduler(self.ranks, limit, self.context_parallel_size, self.layout, self.mode)
        return DynamicScheduler(
            self.ranks,
            limit,
            self.cost,
            self.layout,
            mode=self.mode,
            min_context_parallel_size=self.min_context_parallel_size,
            max_context_parallel_size=self.max_context_parallel_size,
        )

    def changes_from(self, other: AuditSettings) -> list[str]:
        """Each setting that is another one, as ``name: before -> now``."""
        own, before = self.to_json(), other.to_json()
        cost = "cost_model: other coefficients"
        changed = [name for name in own if own[name] != before[name]]
        return [cost if name == "cost" else f"{name}: {before[name]} -> {own[name]}" for name in changed]

    def to_json(self) -> dict[str, Any]:
        """JSON-able values; :meth:`from_json` reads them back."""
        return asdict(self) | {"cost": self.cost.to_dict()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> AuditSettings:
        """Read what :meth:`to_json` wrote."""
        names = {field.name for field in fields(cls)}
        values = {name: value for name, value in data.items() if name in names}
        return cls(**values | {"cost": CostModel.from_dict(data["cost"], source="a set of boundaries")})
