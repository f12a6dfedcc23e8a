"""Runs the user's step for each of this rank's packs and joins the results of all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_dcp.batch.packed import PackedBatch
from lightning_dcp.errors import BatchError, RegionError
from lightning_dcp.models.region import Regions
from lightning_dcp.parallel.randomness import seeded
from lightning_dcp.step.logs import PackLogs, WeightedLogs, recording, replay
from lightning_dcp.step.metrics import counted_once, metrics_of_batch
from lightning_dcp.step.outputs import PackOutput, join_outputs
from lightning_dcp.step.scheduled import PackWork, ScheduledBatch
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
        busy: for each rank of the plane the seconds it ran its packs without waiting for others.
        seconds: the longest that a rank took for its packs.
    """

    output: Any
    busy: tuple[float, ...]
    seconds: float


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
) -> BatchResult:
    """Run a step on every pack of this rank, then join outputs and logs over the plane.

    Args:
        scheduled: the batch and its plan.
        module: the user's module.
        regions: its context-parallel regions.
        step: the user's step.
        after: what happens to each output at once (backward, in training).
    """
    start, waited = time.perf_counter(), scheduled.clock.seconds
    with metrics_of_batch(module, scheduled.groups.control) as windows:
        each = (_run_pack(work, module, regions, step, after, windows) for work in scheduled.works())
        results = [result for result in each if result is not None]
        seconds = time.perf_counter() - start
        busy = seconds - (scheduled.clock.seconds - waited)
    return _join(scheduled, module, results, busy, seconds)


def _run_pack(
    work: PackWork,
    module: LightningModule,
    regions: Regions,
    step: RunStep,
    after: AfterStep,
    windows: Sequence[Window],
) -> PackResult | None:
    calls = regions.calls
    with (
        regions.active(work.active),
        recording(module) as logs,
        counted_once(module, leader=work.leader, windows=windows),
        seeded(work.seed, work.active.context.device),
    ):
        output = step(work.batch)
    kept = after(work, output)
    if regions.calls == calls:
        raise RegionError(
            f"the step of {type(module).__name__} called none of its context-parallel regions {list(regions.modules)}: "
            "code that runs beside them sees packs without borders between samples. Call the module itself (not its "
            "parts, nor its forward method), or name the modules that are called: DCPStrategy(regions=[...])."
        )
    return PackResult(work.number, work.weight, kept, logs) if work.leader else None


def _join(
    scheduled: ScheduledBatch, module: LightningModule, results: Iterable[PackResult], busy: float, seconds: float
) -> BatchResult:
    every: list[Any] = [None] * len(scheduled.groups.plane_ranks)
    with scheduled.clock.waiting():
        dist.all_gather_object(every, (list(results), busy, seconds), group=scheduled.groups.control)
    in_order = sorted((r for results, _, _ in every for r in results), key=lambda r: r.number)
    packs = list(scheduled.plan.packs())
    logs = [WeightedLogs(r.logs, r.weight, len(packs[r.number].samples)) for r in in_order]
    replay(module, logs, samples=len(scheduled.plan.lengths), summed=scheduled.normalization == "sum")
    outputs = [_pack_output(packs[r.number].samples, scheduled.plan.lengths, r) for r in in_order]
    output = join_outputs(outputs, packed=isinstance(scheduled.view.batch, PackedBatch))
    output = pytree.tree_map_only(Tensor, lambda t: t.to(scheduled.device), output)
    return BatchResult(output, tuple(b for _, b, _ in every), max(s for _, _, s in every))


def _pack_output(samples: tuple[int, ...], lengths: Sequence[int], result: PackResult) -> PackOutput:
    return PackOutput(samples, tuple(lengths[s] for s in samples), result.weight, result.output)


def detached(output: Any) -> Any:
    """An output without graphs and on the CPU, ready to be sent."""
    return pytree.tree_map_only(Tensor, lambda t: t.detach().cpu(), output)


def loss_of(output: Any) -> Tensor:
    """The loss in what ``training_step`` returned.

    Raises:
        BatchError: no loss, or one that is no scalar.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor) or loss.dim():
        found = (
            "None" if loss is None else f"{type(loss).__name__} {list(loss.shape) if isinstance(loss, Tensor) else ''}"
        )
        raise BatchError(
            f"training_step must return a scalar loss for every pack (a tensor, or a dict with 'loss'); found {found}. "
            "To leave a pack out, return a loss of 0 that depends on the model's output: `0 * logits.sum()`."
        )
    return loss
