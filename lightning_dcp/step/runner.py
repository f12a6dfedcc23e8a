"""Runs the user's step for each of this rank's packs and joins the results of all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_dcp.errors import BatchError, RegionError
from lightning_dcp.models.region import Regions
from lightning_dcp.parallel.randomness import seeded
from lightning_dcp.parallel.rank_times import RankSummary
from lightning_dcp.stability.record import StepRecord
from lightning_dcp.step.agreement import Attempt, compare
from lightning_dcp.step.control import StepControl
from lightning_dcp.step.logs import PackLogs, WeightedLogs, mark_loss, recording, replay
from lightning_dcp.step.metrics import counted_once, metrics_of, metrics_of_batch
from lightning_dcp.step.outputs import PackOutput, join_outputs
from lightning_dcp.step.outputs_choice import GATHERED, OutputsChoice
from lightning_dcp.step.scheduled import PackWork, ScheduledBatch
from lightning_dcp.step.shards import can_be_sharded, sharded
from lightning_dcp.step.windows import Window


@dataclass(frozen=True)
class PackResult:
    """What one pack gave; sent by its group's leader to all ranks."""

    number: int
    weight: float
    output: Any
    logs: PackLogs


@dataclass(frozen=True)
class BatchResult:
    """What the whole batch gave, the same on all ranks.

    Attributes:
        output: the output in the batch's order, as one call would have returned it.
        busy: for each place in the plane the seconds that its packs ran without waiting for others.
        seconds: the longest that a rank took for its packs.
        record: what was measured of a training step; None where nothing is.
    """

    output: Any
    busy: tuple[float, ...]
    seconds: float
    record: StepRecord | None = None


RunAll = Callable[[Sequence[PackWork], Callable[[PackWork], None]], None]
"""Runs packs, one after another or through a pipeline, by a function of one."""
RunStep = Callable[[Any], Any]
"""Runs the user's step on one pack's batch."""
AfterStep = Callable[[PackWork, Any], Any]
"""Gets the step's output while its graph is alive; returns what is kept of it."""


def run_packs(
    scheduled: ScheduledBatch,
    module: LightningModule,
    regions: Regions,
    step: RunStep,
    after: AfterStep,
    outputs: OutputsChoice = GATHERED,
    run_all: RunAll | None = None,
    control: StepControl | None = None,
) -> BatchResult:
    """Run a step on every pack of this rank, then join outputs and logs over the plane.

    Args:
        scheduled: the batch and its plan.
        module: the user's module.
        regions: its context-parallel regions.
        step: the user's step.
        after: what happens to each output at once (backward, in training).
        outputs: whether the step sees whole samples or this rank's tokens; decided here while it is not.
        run_all: runs the packs; by default one after another.
        control: watches the step; None: it is not timed.
    """
    if control is not None:
        control.begin()
    start, waited = time.perf_counter(), scheduled.clock.seconds
    with metrics_of_batch(module, scheduled.groups.control) as windows:
        runner = _PackRunner(scheduled, module, regions, step, after, windows, outputs)
        if run_all is None:
            _one_by_one(scheduled.works(), runner.run)
        else:
            run_all(list(scheduled.works()), runner.run)
        seconds = time.perf_counter() - start
        busy = seconds - (scheduled.clock.seconds - waited)
    summary = None
    if control is not None:
        with scheduled.clock.waiting():
            summary = control.finish()
    own = _RankResult(scheduled.groups.rank, runner.results, busy, seconds, runner.verdict, summary)
    return _join(scheduled, module, own, outputs, control)


def _one_by_one(works: Iterable[PackWork], run: Callable[[PackWork], None]) -> None:
    for work in works:
        run(work)


class _PackRunner:
    """Runs the packs of one batch on this rank.

    Attributes:
        results: what the packs gave that this rank speaks for.
        verdict: what a trial of sharded outputs gave: None for no trial, "" for agreement, or why not.
    """

    def __init__(
        self,
        scheduled: ScheduledBatch,
        module: LightningModule,
        regions: Regions,
        step: RunStep,
        after: AfterStep,
        windows: Sequence[Window],
        outputs: OutputsChoice,
    ) -> None:
        self.scheduled, self.module, self.regions = scheduled, module, regions
        self.step, self.after, self.windows, self.outputs = step, after, windows, outputs
        self.results: list[PackResult] = []
        self.verdict: str | None = None
        self.trial = scheduled.trial_pack() if outputs.sharded is None else None

    def run(self, work: PackWork) -> None:
        """Run one pack; keep the result where this rank speaks for its group."""
        recorder = self.scheduled.clock.recorder
        if recorder is not None and not recorder.noting:  # evaluation: what a rank holds need not be told
            recorder = None
        with nullcontext() if recorder is None else recorder.pack(self.scheduled.share(work)):
            if self.outputs.sharded and can_be_sharded(work):
                work = self._shard(work)
            kept, logs = self._step(work, counted=work.leader)
            if work.number == self.trial and can_be_sharded(work):
                with nullcontext() if recorder is None else recorder.paused():
                    self.verdict = self._try_sharded(work)
        if work.leader:
            self.results.append(PackResult(work.number, work.weight, kept, logs))

    def _step(self, work: PackWork, *, counted: bool) -> tuple[Any, PackLogs]:
        calls = self.regions.calls
        with (
            self.regions.active(work.active),
            recording(self.module) as logs,
            counted_once(self.module, leader=counted, windows=self.windows),
            seeded(work.seed, work.active.context.device),
        ):
            output = self.step(work.batch)
        mark_loss(logs, scalar_loss(output))
        kept = self.after(work, output)
        if self.regions.calls == calls:
            raise RegionError(
                f"the step of {type(self.module).__name__} called none of its context-parallel regions "
                f"{list(self.regions.modules)}: code that runs beside them sees packs without borders between samples. Call "
                "the module itself (not its parts, nor its forward method), or name the modules that are called: "
                "DCPStrategy(regions=[...])."
            )
        return kept, logs

    def _shard(self, work: PackWork) -> PackWork:
        return sharded(work, self.scheduled.normalization, sum(self.scheduled.targets))

    def _try_sharded(self, work: PackWork) -> str | None:
        def attempt(way: PackWork) -> Attempt:
            before = sum(metric._update_count for metric in metrics_of(self.module))
            with counted_once(self.module, leader=False, windows=self.windows):
                kept, logs = self._step(replace(way, leader=True), counted=True)
                updates = sum(metric._update_count for metric in metrics_of(self.module)) - before
            return Attempt(kept, WeightedLogs(logs, way.weight, len(way.pack.samples)), updates)

        parameters = list(self.module.parameters())
        return compare(work, attempt, self._shard, parameters, self.outputs.tolerance, self.scheduled.clock)


@dataclass(frozen=True)
class _RankResult:
    """What one rank tells the others of a batch."""

    place: int
    packs: list[PackResult]
    busy: float
    seconds: float
    verdict: str | None
    summary: RankSummary | None


def _join(
    scheduled: ScheduledBatch,
    module: LightningModule,
    own: _RankResult,
    outputs_choice: OutputsChoice,
    control: StepControl | None,
) -> BatchResult:
    every: list[Any] = [None] * len(scheduled.groups.world_ranks)
    with scheduled.clock.waiting():
        dist.all_gather_object(every, own, group=scheduled.groups.control)
    outputs_choice.settle([rank.verdict for rank in every])
    in_order = sorted((result for rank in every for result in rank.packs), key=lambda r: r.number)
    packs = list(scheduled.plan.packs())
    logs = [WeightedLogs(r.logs, r.weight, len(packs[r.number].samples)) for r in in_order]
    replay(module, logs, samples=len(scheduled.plan.lengths), summed=scheduled.normalization == "sum")
    outputs = [_pack_output(packs[r.number].samples, scheduled.plan.lengths, r) for r in in_order]
    output = join_outputs(outputs, packed=scheduled.view.packed)
    output = pytree.tree_map_only(Tensor, lambda t: t.to(scheduled.device), output)
    record = None
    if control is not None:
        told = [rank.summary for rank in every]
        record = control.join(scheduled.plan, told, scheduled.planned.settled.layouts, scheduled.view.segments)
    return BatchResult(output, _busy(every), max(rank.seconds for rank in every), record)


def _busy(every: Sequence[_RankResult]) -> tuple[float, ...]:
    """By place in the plane, the longest among tensor-parallel ranks and pipeline stages."""
    places = range(1 + max(rank.place for rank in every))
    return tuple(max(rank.busy for rank in every if rank.place == place) for place in places)


def _pack_output(samples: tuple[int, ...], lengths: Sequence[int], result: PackResult) -> PackOutput:
    return PackOutput(samples, tuple(lengths[s] for s in samples), result.weight, result.output)


def detached(output: Any) -> Any:
    """An output without graphs and on the CPU, ready to be sent."""
    return pytree.tree_map_only(Tensor, lambda t: t.detach().cpu(), output)


def scalar_loss(output: Any) -> Tensor | None:
    """The loss in what any step returned; None if it returned none."""
    loss = _loss_entry(output)
    return loss if isinstance(loss, Tensor) and not loss.dim() else None


def _loss_entry(output: Any) -> Any:
    return output.get("loss") if isinstance(output, Mapping) else output


def loss_of(output: Any) -> Tensor:
    """The loss in what ``training_step`` returned.

    Raises:
        BatchError: no loss, or one that is no scalar.
    """
    loss = _loss_entry(output)
    if not isinstance(loss, Tensor) or loss.dim():
        found = (
            "None" if loss is None else f"{type(loss).__name__} {list(loss.shape) if isinstance(loss, Tensor) else ''}"
        )
        raise BatchError(
            f"training_step must return a scalar loss for every pack (a tensor, or a dict with 'loss'); found {found}. "
            "To leave a pack out, return a loss of 0 that depends on the model's output: `0 * logits.sum()`."
        )
    return loss
