"""One step watched from its first pack to what is decided at its end: what a strategy has to call."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lightning_dcp.parallel.groups import ParallelGroups
from lightning_dcp.parallel.hop_times import HopRecorder
from lightning_dcp.parallel.layout import PackLayout
from lightning_dcp.parallel.link_table import LinkTable
from lightning_dcp.parallel.rank_times import RankSummary
from lightning_dcp.schedule.plan import StepPlan
from lightning_dcp.segments import SampleSegments
from lightning_dcp.stability.assemble import assemble
from lightning_dcp.stability.expected import HopExpectation
from lightning_dcp.stability.governor import Governor
from lightning_dcp.stability.probe import probe_links
from lightning_dcp.stability.record import StepRecord
from lightning_dcp.stability.settings import AlarmSettings


class StepWatch:
    """Times the steps of one rank and, with those of the others, finds slow links and ranks.

    In each step: ``recorder.begin_step()``, ``recorder.pack(...)`` around each pack, ``recorder.finish_step()``; the
    summaries of all ranks of the world come together in :meth:`join`; then :meth:`probe`. Made by all ranks of the world at
    the same time.

    Args:
        groups: the process groups.
        device: where packs are computed.
        governor: decides what is done.
        settings: what makes an alarm.
        table: of links, if they were measured.

    Attributes:
        recorder: to be the clock's :attr:`~lightning_dcp.parallel.clock.WaitClock.recorder`.
        governor: its ``state`` is what is in force.
    """

    def __init__(
        self,
        groups: ParallelGroups,
        device: torch.device,
        governor: Governor,
        settings: AlarmSettings,
        table: LinkTable | None = None,
    ) -> None:
        self.recorder = HopRecorder(groups, device)
        self.governor = governor
        self._groups, self._device = groups, device
        self._expectation = HopExpectation(table, settings.window)

    def join(
        self,
        step: int,
        plan: StepPlan,
        told: Sequence[RankSummary],
        layouts: Sequence[PackLayout | None] = (),
        segments: Sequence[SampleSegments] | None = None,
    ) -> StepRecord:
        """The record of a step, with what was decided at its end; the same on all ranks.

        Args:
            step: number of the batch in the run.
            plan: of the batch.
            told: by all ranks of the world, in the same order on all of them.
            layouts: of each pack, in the plan's order; None where its name says it, and empty where that holds for all.
            segments: of each sample of the batch; None: plain samples.
        """
        return self.governor.decide(assemble(step, plan, told, self._expectation, layouts, segments))

    def probe(self) -> None:
        """Try avoided links that are due; what this rank sees is in its next summary. Call it before the next step."""
        self.recorder.probes = probe_links(self._groups, self.governor.probes_due(), self._device)
