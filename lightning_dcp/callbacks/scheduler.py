"""The callback that owns the scheduler: a plan before each step, everything back in order after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_dcp.errors import ConfigurationError, Problem
from lightning_dcp.schedule.plan import Scheduler
from lightning_dcp.step.runner import BatchResult
from lightning_dcp.step.scheduled import ScheduledBatch


class SchedulerCallback(Callback):
    """Plans every batch, whatever loop it is in.

    :class:`~lightning_dcp.DCPStrategy` adds one if the trainer has none. Add one yourself to use a scheduler of your
    own: an object with ``schedule(lengths) -> StepPlan``, or a function from the plane's size to one. It decides alone:
    the strategy's ``dynamic_context_parallel``, ``layout`` and ``cost_model`` are settings of the built-in schedulers.

    Args:
        scheduler: the scheduler; by default the strategy's (dynamic, or static with ``dynamic_context_parallel=False``).

    Attributes:
        scheduled: the batch of the step under way, with its plan.
        result: what the last step gave.
    """

    def __init__(self, scheduler: Scheduler | Callable[[int], Scheduler] | None = None) -> None:
        self.scheduler = scheduler
        self.scheduled: ScheduledBatch | None = None
        self.result: BatchResult | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse to run under a strategy that would not use the plans."""
        from lightning_dcp.strategy import DCPStrategy

        if not isinstance(trainer.strategy, DCPStrategy):
            raise ConfigurationError(
                [
                    Problem(
                        "a SchedulerCallback among the trainer's callbacks",
                        f"strategy {type(trainer.strategy).__name__}, which would ignore its plans",
                        "use Trainer(strategy=DCPStrategy(...)) or strategy='dcp'",
                    )
                ]
            )

    def resolve(self, default: Callable[[], Scheduler], plane_size: int) -> Scheduler:
        """The scheduler in force, made at set-up."""
        if self.scheduler is None:
            return default()
        return self.scheduler if hasattr(self.scheduler, "schedule") else self.scheduler(plane_size)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Plan a training batch."""
        self._plan(trainer, batch, batch_idx)

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Plan a validation batch."""
        self._plan(trainer, batch, batch_idx)

    def on_test_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Plan a test batch."""
        self._plan(trainer, batch, batch_idx)

    def on_predict_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Plan a batch to predict."""
        self._plan(trainer, batch, batch_idx)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Tell the other ranks why this one ends."""
        strategy: Any = trainer.strategy
        strategy.report_failure(exception)

    def _plan(self, trainer: Trainer, batch: Any, batch_idx: int) -> None:
        strategy: Any = trainer.strategy
        self.scheduled = strategy.schedule(batch, batch_idx)
