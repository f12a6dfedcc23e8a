"""What the steps of a run are governed by: ring orders, where hops are timed, and what is done about slow ones."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Literal

from lightning_dcp.parallel.layout import PackLayout
from lightning_dcp.parallel.link_table import LinkTable
from lightning_dcp.parallel.rank_times import RankSummary
from lightning_dcp.parallel.ring_orders import RingOrders
from lightning_dcp.schedule.plan import StepPlan
from lightning_dcp.segments import SampleSegments
from lightning_dcp.stability.governor import Fallback
from lightning_dcp.stability.record import StepRecord
from lightning_dcp.stability.watch import StepWatch

log = logging.getLogger(__name__)

Detail = Literal["ranks", "packs", "spans"]
"""What the records of steps tell: sums of each rank; also when each pack ran; also what ranks did in between."""


class StepControl:
    """Ring orders in force, and the watch over training steps.

    Args:
        orders: in which order rings visit ranks while nothing is slow.
        table: the links between ranks, if they were measured.
        watch: times steps, and decides; None: nothing is timed, and nothing is ever changed.
        speaks: whether this rank tells of alarms and actions.

    Attributes:
        table: as given.
        watch: as given.
        detail: of the records.
        steps: training batches before the one under way.
    """

    def __init__(
        self,
        orders: RingOrders,
        table: LinkTable | None = None,
        watch: StepWatch | None = None,
        *,
        speaks: bool = False,
    ) -> None:
        self.table, self.watch, self.steps = table, watch, 0
        self.detail: Detail = "ranks"
        self._speaks, self._fixed = speaks, Fallback(orders)

    @property
    def state(self) -> Fallback:
        """What is in force for the next batch; another object only if something has changed."""
        return self._fixed if self.watch is None else self.watch.governor.state

    def begin(self) -> None:
        """The packs of a training batch begin."""
        if self.watch is not None:
            self.watch.recorder.begin_step()

    def finish(self) -> RankSummary | None:
        """What this rank tells the others of the step. Collective."""
        if self.watch is None:
            return None
        spans = self.detail == "spans"
        return self.watch.recorder.finish_step(packs=spans or self.detail == "packs", spans=spans)

    def join(
        self,
        plan: StepPlan,
        told: Sequence[RankSummary | None],
        layouts: Sequence[PackLayout | None] = (),
        segments: Sequence[SampleSegments] | None = None,
    ) -> StepRecord | None:
        """The record of the step, with what was decided at its end. Ranks whose link is tried take part in that.

        Args:
            plan: of the batch.
            told: by all ranks of the world.
            layouts: of each pack, in the plan's order; None where its name says it, and empty where that holds for all.
            segments: of each sample of the batch; None: plain samples.
        """
        summaries = [summary for summary in told if summary is not None]
        if self.watch is None or len(summaries) < len(told):
            return None
        record = self.watch.join(self.steps, plan, summaries, layouts, segments)
        self.watch.probe()
        for event in record.events if self._speaks else ():
            log.warning("step %d: %s", event.step, event.text)
        return record
