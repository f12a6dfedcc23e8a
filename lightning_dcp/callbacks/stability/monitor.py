"""How steady training is: quantiles, where the ranks' time goes, alarms, what makes the tail; logged and recorded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from rich.console import Console

from lightning_dcp.callbacks.stability.kept import KeptSteps
from lightning_dcp.callbacks.stability.measured import Measured
from lightning_dcp.callbacks.stability.records import planned_packs, untimed_record
from lightning_dcp.callbacks.stability.run_facts import run_facts
from lightning_dcp.callbacks.stability.summary import summary_table
from lightning_dcp.callbacks.timed import TimedBatches, log_values, naming_failures, number_problems, scheduler_of
from lightning_dcp.errors import DataError, raise_problems
from lightning_dcp.metrics.speed import quantile_problems
from lightning_dcp.stability.record import Event, StepRecord
from lightning_dcp.stability.run_folder import FOLDER, RunFolder
from lightning_dcp.stability.run_lines import without_intervals
from lightning_dcp.step.runner import BatchResult
from lightning_dcp.step.scheduled import ScheduledBatch


class StabilityMonitor(TimedBatches):
    """Logs how steady steps are, tells of alarms, and records the run for ``lightning-dcp report``.

    A step's time is that of its packs, from the first rank's start to the last rank's end, the same on all ranks (the
    optimizer, loading and validation are not in it: :class:`~lightning_dcp.PerformanceMonitor` times whole batches). Every
    few batches these go to the trainer's loggers and to ``trainer.callback_metrics``, the same on all ranks:

    - ``stability/step_time_p50``, ``stability/step_time_p99`` (seconds) and ``stability/step_time_p99_over_p50``, over the
      window.
    - ``stability/tokens_per_second``, over the window, and ``stability/steadiness``: the share of it that would be
      reached if each step took the median.
    - ``stability/busy_share``, ``stability/wait_share``, ``stability/transfer_share``: how the ranks' time went since the
      last time, on the mean; with ``_worst`` behind it, on the rank where it is worst. Without hop timing
      (``DCPStrategy(hop_timing=False)``) all that is not busy is waiting.
    - ``stability/memory_max_gib``: peak memory of the rank that uses most.
    - ``stability/alarms`` so far, ``stability/alarms_active`` and ``stability/actions``.

    Alarms, of which the strategy tells in words, are logged at once as ``stability/slowdown/link_2_to_3``: times its expected
    time, and 1 when it is over. At the end a table names the samples and kinds of segments that slow steps, more than 10 %
    over the median, had on the rank that they waited for: each has its part of the seconds beyond the median. Give samples
    ids (``sample_ids``), else they are the places in the batch.

    Args:
        every_n_batches: batches between two rows.
        window: last batches that quantiles and throughput are of.
        warmup_batches: first batches that nothing is counted of (the first use of a group is slow); they are recorded.
        quantiles: of the step time, between 0 and 1, beside the median.
        top_k: hot samples and kinds at the end.
        record: write the run's record into the logger's folder, as ``stability/run.json`` and ``stability/steps.jsonl``.
        timeline_every: steps from one to the next that is recorded with a timeline; 0 for none. The first after the
            warm-up and those slower than 99 % of the ones before are, too.
        prefix: of all names.

    Raises:
        ConfigurationError: all arguments that make no sense; at the start, a strategy that makes no plans.
        DataError: at the start, a record of another format in the folder.
    """

    def __init__(
        self,
        every_n_batches: int = 50,
        *,
        window: int = 200,
        warmup_batches: int = 2,
        quantiles: Sequence[float] = (0.5, 0.99),
        top_k: int = 10,
        record: bool = True,
        timeline_every: int = 200,
        prefix: str = "stability/",
    ) -> None:
        problems = number_problems(
            every_n_batches=(every_n_batches, 1),
            window=(window, 1),
            warmup_batches=(warmup_batches, 0),
            top_k=(top_k, 1),
            timeline_every=(timeline_every, 0),
        )
        raise_problems(problems + quantile_problems(quantiles))
        self.every_n_batches, self.warmup_batches, self.prefix = every_n_batches, warmup_batches, prefix
        self.record, self.timeline_every = record, timeline_every
        self._settings: dict[str, Any] = {"window": window, "quantiles": tuple(quantiles), "top_k": top_k}
        self._measured: Measured | None = None
        self._folder: RunFolder | None = None
        self._begin()

    def _begin(self) -> None:
        self._kept = KeptSteps(self.timeline_every)
        self._seen = self._unpublished = self._alarms = self._actions = 0
        self._active: set[str] = set()

    # ------------------------------------------------------------------- the run

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin anew; open the record."""
        scheduler_of(trainer, self)
        strategy: Any = trainer.strategy
        self._release()
        self._begin()
        self._measured = Measured(strategy.topology.plane_size, **self._settings)
        self._measured.join(strategy.groups.control)
        strategy.control.detail = "spans" if self.record else "packs"
        with naming_failures(trainer):
            self._open(trainer)

    def _open(self, trainer: Trainer) -> None:
        """Begin the record on one rank; the others wait here, where they say why if that fails."""
        folder = trainer.log_dir or trainer.default_root_dir  # asks all ranks, so it is read on all
        if self.record and trainer.is_global_zero:
            self._folder = RunFolder(Path(folder, FOLDER), {"warmup_batches": self.warmup_batches} | run_facts(trainer))
        trainer.strategy.barrier()

    def count(self, trainer: Trainer, scheduled: ScheduledBatch, result: BatchResult, seconds: float) -> None:
        """Count the batch, tell of its alarms, record it; log, if it is time."""
        step = trainer.fit_loop.epoch_loop.total_batch_idx
        record = result.record or untimed_record(step, scheduled, result)
        self._tell(trainer, record.events)
        self._seen += 1
        counted = self._seen > self.warmup_batches
        self._write(record, timeline=counted and self._kept.keeps(record.seconds))
        if not counted:
            return
        self._metrics.update(record, record.packs or planned_packs(scheduled))
        self._unpublished += 1
        if self._unpublished == self.every_n_batches:
            self._publish(trainer)

    @property
    def _metrics(self) -> Measured:
        if self._measured is None:
            raise RuntimeError("the metrics are made when training starts")
        return self._measured

    def _tell(self, trainer: Trainer, events: Iterable[Event]) -> None:
        """Log alarms and their ends as numbers; the strategy has told of them in words."""
        for event in events:
            name = f"{self.prefix}slowdown/{event.subject.replace('->', '_to_').replace(' ', '_')}"
            if event.kind in ("alarm", "cleared"):
                log_values(trainer, {name: event.slowdown if event.kind == "alarm" else 1.0})
            if event.kind == "alarm":
                self._alarms += 1
                self._active.add(event.subject)
            elif event.kind == "cleared":
                self._active.discard(event.subject)
            self._actions += event.kind == "action"

    def _write(self, record: StepRecord, *, timeline: bool) -> None:
        if self._folder is None:
            return
        try:
            self._folder.add(record if timeline else without_intervals(record))
        except (OSError, DataError) as error:  # a full disk must not end training
            self._folder = None
            rank_zero_warn(f"the record of this run ends at step {record.step}: {error}")

    def _publish(self, trainer: Trainer) -> None:
        values: dict[str, Any] = dict(self._metrics.values(self._place(trainer), _device(trainer)))
        values |= {"alarms": self._alarms, "alarms_active": len(self._active), "actions": self._actions}
        log_values(trainer, {self.prefix + name: value for name, value in values.items()})
        self._unpublished = 0

    def _place(self, trainer: Trainer) -> int:
        strategy: Any = trainer.strategy
        return int(strategy.groups.rank)

    # ------------------------------------------------------------------- its end

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log what is left."""
        if self._unpublished:
            with naming_failures(trainer):
                self._publish(trainer)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Close the record; print the table, on one rank."""
        path = None if self._folder is None else self._folder.path
        self._close()
        if trainer.is_global_zero and self._seen > self.warmup_batches:
            numbers: Any = {"alarms": self._alarms, "actions": self._actions, "left_out": self.warmup_batches}
            Console().print(summary_table(self._metrics, folder=path, **numbers))

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Let go of the run's groups."""
        self._release()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Write what there is, and let go of the run's groups: Lightning leaves out ``teardown`` of callbacks then."""
        self._release()

    def _release(self) -> None:
        self._close()
        if self._measured is not None:
            self._measured.release()

    def _close(self) -> None:
        if self._folder is None:
            return
        try:
            self._folder.flush()
        except (OSError, DataError) as error:
            rank_zero_warn(f"the last steps of this run's record are lost: {error}")
        self._folder = None


def _device(trainer: Trainer) -> Any:
    return trainer.strategy.root_device
