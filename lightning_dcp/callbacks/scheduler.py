"""The callback that owns the scheduler: a plan before each step, everything back in order after it."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_dcp.errors import ConfigurationError, Problem
from lightning_dcp.schedule.choice import SchedulerLike
from lightning_dcp.step.runner import BatchResult
from lightning_dcp.step.scheduled import ScheduledBatch


class SchedulerCallback(Callback):
    """Plans every batch, whatever loop it is in.

    :class:`~lightning_dcp.DCPStrategy` adds one if the trainer has none. A scheduler of your own is given here or as
    ``DCPStrategy(scheduler=...)``: an object with ``schedule(lengths) -> StepPlan``, or a function (or class) from the
    plane's size to one. It decides alone; options of the built-in schedulers are refused beside it.

    ``schedule`` runs in a thread of its own, while the batch before is computed: once for each batch, in the order in
    which the loaders are read, never twice at the same time. What it returns must follow from the lengths and its own
    settings alone: a batch that hooks change between loader and step is planned again, and so is one whose planning
    failed, so that the error is raised by its step. ``DCPStrategy(plan_ahead=False)`` plans in the step.

    Args:
        scheduler: the scheduler; by default what the strategy's arguments say.

    Attributes:
        scheduled: the batch of the step under way, with its plan.
        result: what the last step gave.
    """

    def __init__(self, scheduler: SchedulerLike | None = None) -> None:
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
