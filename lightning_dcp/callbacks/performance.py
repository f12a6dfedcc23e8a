"""How fast and how well balanced training is, logged every few batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torchmetrics import Metric

from lightning_dcp.callbacks.timed import TimedBatches, log_values, naming_failures, number_problems, scheduler_of
from lightning_dcp.errors import raise_problems
from lightning_dcp.metrics import BusyShare, ModelFlopUtilization, PaddingShare, StepTime, TokenThroughput
from lightning_dcp.parallel.context import region_tokens
from lightning_dcp.schedule.plan import Pack
from lightning_dcp.step.metric_state import StateSync
from lightning_dcp.step.runner import BatchResult
from lightning_dcp.step.scheduled import ScheduledBatch


class PerformanceMonitor(TimedBatches):
    """Logs the speed of training, over all ranks, every few batches.

    The values go to the trainer's loggers and to ``trainer.callback_metrics``, the same on all ranks. Each is of the
    batches since the last time, those left over at the end of training included:

    - ``perf/tokens_per_second``: tokens of all ranks, over the time of the slowest rank.
    - ``perf/busy_share``: part of the ranks' time, while packs run, that they do not wait for each other.
    - ``perf/padding_share``: part of the tokens computed inside regions that are fill. Packs have no padding, so this is 0
      but for packs of fewer than two tokens a rank, sequence parallelism, and back ends that need padding.
    - ``perf/step_time_p50``, ``perf/step_time_p99``: seconds, from the start of a batch to its end (the optimizer step
      included; planning, loading and validation not).
    - ``perf/mfu``: model FLOP utilisation, if ``utilization`` is given.

    A batch is one call of the loader, also with ``accumulate_grad_batches``. Logging costs a small exchange between the
    ranks, each time.

    Args:
        every_n_batches: batches between two rows.
        warmup_batches: first batches of a run that are left out (the first use of a group is slow).
        quantiles: of the step time, between 0 and 1; ``perf/step_time_p90`` is that of 0.9.
        utilization: knows the model's size and the peak of a rank,
            e.g. ``ModelFlopUtilization(parameters=7_000_000_000, layers=32, heads=32, head_size=128, peak_flops="h100")``.
        prefix: of all names.

    Raises:
        ConfigurationError: numbers of batches that make no sense; at the start, a strategy that makes no plans.
    """

    def __init__(
        self,
        every_n_batches: int = 50,
        *,
        warmup_batches: int = 2,
        quantiles: Sequence[float] = (0.5, 0.99),
        utilization: ModelFlopUtilization | None = None,
        prefix: str = "perf/",
    ) -> None:
        raise_problems(number_problems(every_n_batches=(every_n_batches, 1), warmup_batches=(warmup_batches, 0)))
        self.every_n_batches, self.warmup_batches, self.prefix = every_n_batches, warmup_batches, prefix
        self.tokens, self.busy, self.padding = TokenThroughput(), BusyShare(), PaddingShare()
        self.step_time, self.utilization = StepTime(quantiles), utilization
        self._seen = self._counted = 0

    @property
    def _metrics(self) -> list[Metric]:
        optional = [] if self.utilization is None else [self.utilization]
        return [self.tokens, self.busy, self.padding, self.step_time, *optional]

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin anew."""
        scheduler_of(trainer, self)
        strategy: Any = trainer.strategy
        for metric in self._metrics:
            metric.reset()
            StateSync.install(metric, strategy.groups.control)  # states lie on the CPU
        self._seen = self._counted = 0

    def count(self, trainer: Trainer, scheduled: ScheduledBatch, result: BatchResult, seconds: float) -> None:
        """Count the batch; log, if it is time."""
        self._seen += 1
        if self._seen <= self.warmup_batches:
            return
        self._count(scheduled, result, seconds)
        if self._counted == self.every_n_batches:
            self._publish(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log what is left."""
        if self._counted:
            with naming_failures(trainer):
                self._publish(trainer)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Let go of the run's groups."""
        self._release()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Let go of the run's groups: Lightning leaves out ``teardown`` of callbacks then."""
        self._release()

    def _release(self) -> None:
        for metric in self._metrics:
            StateSync.remove(metric)

    def _count(self, scheduled: ScheduledBatch, result: BatchResult, seconds: float) -> None:
        """This rank's part: the samples of the groups that it leads."""
        rank, plan = scheduled.groups.rank, scheduled.plan
        own = [pack for pack in plan.packs() if pack.first_rank == rank]
        options: Any = {"token_multiple": scheduled.token_multiple, "alignment": plan.alignment}
        lengths = [plan.lengths[sample] for pack in own for sample in pack.samples]
        self.tokens.update(sum(lengths), seconds)
        self.busy.update(result.busy[rank], result.seconds)
        self.padding.update(sum(lengths), sum(_computed(pack, plan.lengths, **options) for pack in own))
        self.step_time.update(seconds)
        if self.utilization is not None:
            self.utilization.update(lengths, seconds)
        self._counted += 1

    def _publish(self, trainer: Trainer) -> None:
        values: dict[str, Tensor] = {
            "tokens_per_second": self.tokens.compute(),
            "busy_share": self.busy.compute(),
            "padding_share": self.padding.compute(),
            **{f"step_time_{name}": value for name, value in self.step_time.compute().items()},
        }
        if self.utilization is not None:
            values["mfu"] = self.utilization.compute()
        log_values(trainer, {self.prefix + name: value for name, value in values.items()})
        for metric in self._metrics:
            metric.reset()
        self._counted = 0


def _computed(pack: Pack, lengths: Sequence[int], **options: Any) -> int:
    """Tokens that the ranks of a pack compute inside regions, fill tokens included."""
    return sum(region_tokens(pack.layout, [lengths[sample] for sample in pack.samples], pack.cp_size, **options))
