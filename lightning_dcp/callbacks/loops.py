"""What callbacks share that do the same in every loop: in training, validation, test and prediction."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Literal

from lightning.pytorch import Callback, LightningModule, Trainer

Stage = Literal["train", "validate", "test", "predict"]
"""The loops of Lightning."""
STAGES: tuple[Stage, ...] = ("train", "validate", "test", "predict")


class EveryLoop(Callback):
    """Three hooks in place of those of each loop."""

    @abstractmethod
    def loop_starts(self, trainer: Trainer, module: LightningModule) -> None:
        """A loop starts, with the module as it will run; validation starts inside training, too."""

    @abstractmethod
    def batch_begins(self, trainer: Trainer, stage: Stage) -> None:
        """A batch begins; the scheduler callback has planned it."""

    @abstractmethod
    def batch_ends(self, trainer: Trainer, stage: Stage) -> None:
        """A batch is over, on all ranks."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Training starts."""
        self.loop_starts(trainer, pl_module)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Validation starts."""
        self.loop_starts(trainer, pl_module)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A test starts."""
        self.loop_starts(trainer, pl_module)

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prediction starts."""
        self.loop_starts(trainer, pl_module)

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        """A training batch begins."""
        self.batch_begins(trainer, "train")

    def on_validation_batch_start(self, trainer: Trainer, *args: Any) -> None:
        """A validation batch begins."""
        self.batch_begins(trainer, "validate")

    def on_test_batch_start(self, trainer: Trainer, *args: Any) -> None:
        """A test batch begins."""
        self.batch_begins(trainer, "test")

    def on_predict_batch_start(self, trainer: Trainer, *args: Any) -> None:
        """A batch to predict begins."""
        self.batch_begins(trainer, "predict")

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        """A training batch is over."""
        self.batch_ends(trainer, "train")

    def on_validation_batch_end(self, trainer: Trainer, *args: Any) -> None:
        """A validation batch is over."""
        self.batch_ends(trainer, "validate")

    def on_test_batch_end(self, trainer: Trainer, *args: Any) -> None:
        """A test batch is over."""
        self.batch_ends(trainer, "test")

    def on_predict_batch_end(self, trainer: Trainer, *args: Any) -> None:
        """A predicted batch is over."""
        self.batch_ends(trainer, "predict")
