"""A ready LightningModule for next-token training; ordinary Lightning code.

With padded batches it runs under any strategy. Packed batches, the default of the data modules, need DCPStrategy: plain
attention knows no borders between samples.
"""

from __future__ import annotations

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from lightning_dcp.batch.labels import Batch, shifted_labels
from lightning_dcp.loss.next_token import next_token_loss
from lightning_dcp.models.decoder import Decoder


class LanguageModel(LightningModule):
    """Next-token training of a causal model with AdamW and a linear warm-up.

    Args:
        model: ``model(input_ids) -> logits``; a :class:`~lightning_dcp.Decoder` by default.
        learning_rate: peak learning rate.
        weight_decay: AdamW's, on all parameters.
        warmup_steps: optimizer steps over which the rate rises from 0.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        learning_rate: float = 1e-3,
        weight_decay: float = 0.1,
        warmup_steps: int = 10,
    ) -> None:
        super().__init__()
        self.model = Decoder() if model is None else model
        self.learning_rate, self.weight_decay, self.warmup_steps = learning_rate, weight_decay, warmup_steps

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The mean loss over the batch's targets."""
        loss = next_token_loss(self.model(batch["input_ids"]), batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Log the mean loss over the validation set's targets."""
        self._evaluate(batch, "val_loss")

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Log the mean loss over the test set's targets."""
        self._evaluate(batch, "test_loss")

    def _evaluate(self, batch: Batch, name: str) -> None:
        targets = shifted_labels(batch)
        loss = next_token_loss(self.model(batch["input_ids"]), batch)
        # Weighted by targets, so that the epoch's value is the mean over all of them and not over batches.
        count = int(((targets.values() if targets.is_nested else targets) != -100).sum())
        self.log(name, loss, prog_bar=True, batch_size=count)

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The most likely next token at each position."""
        logits: Tensor = self.model(batch["input_ids"])
        return logits.argmax(-1)

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """AdamW, with the learning rate rising linearly over ``warmup_steps``."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.learning_rate, weight_decay=self.weight_decay)
        schedule = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / max(self.warmup_steps, 1)))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
