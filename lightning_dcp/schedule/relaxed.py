"""A scheduler for what a batch allows: a first choice, and another where the first finds no plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_dcp.errors import PlanError
from lightning_dcp.schedule.choice import Scheduler
from lightning_dcp.schedule.plan import StepPlan


@dataclass(frozen=True)
class Relaxed:
    """Plans by the first scheduler, or by the second where a batch is too small for the first.

    Attributes:
        first: the wish: a number of micro-batches that a virtual pipeline runs without gaps, say.
        second: what will do.
    """

    first: Scheduler
    second: Scheduler

    def schedule(self, lengths: Sequence[int]) -> StepPlan:
        """Plan a batch.

        Raises:
            PlanError: what the second raises.
        """
        try:
            return self.first.schedule(lengths)
        except PlanError:
            return self.second.schedule(lengths)
