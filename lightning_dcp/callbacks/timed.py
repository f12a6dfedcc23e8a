"""What callbacks that watch training share: a clock around each batch, and what the batch's step gave."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lightning_dcp.callbacks.scheduler import SchedulerCallback
from lightning_dcp.errors import ConfigurationError, Problem
from lightning_dcp.step.runner import BatchResult
from lightning_dcp.step.scheduled import ScheduledBatch


class TimedBatches(Callback):
    """Times training batches, from their start to their end: the optimizer step is in it, planning and loading are not."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Start the clock."""
        self._start = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Stop it, and count the batch."""
        seconds = time.perf_counter() - self._start
        callback = scheduler_of(trainer, self)
        if callback.scheduled is not None and callback.result is not None:
            with naming_failures(trainer):
                self.count(trainer, callback.scheduled, callback.result, seconds)

    @abstractmethod
    def count(self, trainer: Trainer, scheduled: ScheduledBatch, result: BatchResult, seconds: float) -> None:
        """Take a batch in.

        Args:
            trainer: the trainer.
            scheduled: the batch and its plan.
            result: what its packs gave.
            seconds: from its start to its end.
        """


def naming_failures(trainer: Trainer) -> AbstractContextManager[None]:
    """Around what asks the other ranks: an exchange that breaks off since one of them failed says which one and why.

    The trainer's strategy runs packs, which :func:`scheduler_of` makes sure of.
    """
    strategy: Any = trainer.strategy
    found: AbstractContextManager[None] = strategy._naming_failures()
    return found


def scheduler_of(trainer: Trainer, asking: Callback) -> SchedulerCallback:
    """The callback that owns the scheduler.

    Raises:
        ConfigurationError: there is none, as the strategy runs no packs.
    """
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    found = next((callback for callback in callbacks if isinstance(callback, SchedulerCallback)), None)
    if found is None:
        raise ConfigurationError(
            [
                Problem(
                    f"a {type(asking).__name__} among the trainer's callbacks",
                    f"strategy {type(trainer.strategy).__name__}, which runs no packs",
                    "use Trainer(strategy=DCPStrategy(...)), or leave the callback out",
                )
            ]
        )
    return found


def log_values(trainer: Trainer, values: Mapping[str, float | Tensor]) -> None:
    """Hand values that are the same on all ranks to the trainer's loggers, and to ``trainer.callback_metrics``."""
    step = trainer.fit_loop.epoch_loop._batches_that_stepped
    tensors = {name: torch.as_tensor(value, dtype=torch.float64) for name, value in values.items()}
    trainer._logger_connector.log_metrics(dict(tensors), step=step)
    trainer.callback_metrics.update(tensors)


def number_problems(**numbers: tuple[Any, int]) -> list[Problem]:
    """What is wrong with arguments that are whole numbers.

    Args:
        numbers: by name, the value and the least that it may be.
    """
    return [
        Problem(f"{name}={value!r}", f"not a whole number of {least} or more", f"give {name} of {least} or more")
        for name, (value, least) in numbers.items()
        if not isinstance(value, int) or isinstance(value, bool) or value < least
    ]
