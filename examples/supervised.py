"""Supervised fine-tuning with three kinds of means: over tokens, over samples, or none.

    python examples/supervised.py --devices 2 --reduction samples

Shows that ``loss_normalization`` says what the loss of a module is over one batch, and nothing else changes:

- ``tokens``: every target weighs the same, so long answers weigh more than short ones;
- ``samples``: every sample weighs the same, whatever its length;
- ``sum``: nothing is divided, as for losses that are scaled by hand.
"""

from __future__ import annotations

from typing import Literal

import lightning.pytorch as L
import torch
from torch import Tensor, nn

from lightning_dcp import Decoder
from lightning_dcp.batch.labels import Batch, shifted_labels
from lightning_dcp.loss import sample_means, token_log_probs, token_mean

Reduction = Literal["tokens", "samples", "sum"]


class Supervised(L.LightningModule):
    """Cross-entropy of the next token.

    With ``l[s, t]`` the negative log-probability of target ``t`` of sample ``s``, ``n[s]`` targets in it and S samples, the
    loss is ``sum(l) / sum(n)``, ``sum_s(sum_t(l[s, t]) / n[s]) / S``, or ``sum(l)``. The first two are the usual two readings
    of "mean loss"; see https://unsloth.ai/blog/gradient for what mixing them up costs. A sample without targets has a mean
    of 0 and counts as a sample.

    Args:
        model: ``model(input_ids) -> logits``.
        reduction: which of the three; give the strategy the same ``loss_normalization``.
        learning_rate: AdamW's.
    """

    def __init__(
        self, model: nn.Module | None = None, *, reduction: Reduction = "tokens", learning_rate: float = 3e-3
    ) -> None:
        super().__init__()
        self.model = Decoder(vocab_size=32, hidden_size=64, num_layers=2) if model is None else model
        self.reduction, self.learning_rate = reduction, learning_rate

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        targets = shifted_labels(batch)
        counted = targets != -100
        logits = self.model(batch["input_ids"])
        losses = -token_log_probs(logits, targets)
        loss = self.reduced(losses, counted, batch)
        self.log("loss", loss, reduce_fx="sum" if self.reduction == "sum" else "mean")
        # a mean over targets whatever the loss is, so it says over how many
        self.log("nats_per_token", token_mean(losses, counted), batch_size=int(counted.sum()))
        return loss

    def reduced(self, losses: Tensor, counted: Tensor, batch: Batch) -> Tensor:
        """The loss of a batch, from per-token losses that are 0 where there is no target."""
        if self.reduction == "tokens":
            return token_mean(losses, counted)
        if self.reduction == "samples":
            return sample_means(losses, counted, batch).mean()
        return losses.sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)


def main(devices: int = 2, steps: int = 5, reduction: Reduction = "tokens") -> None:
    """Train a small model on made-up documents.

    Args:
        devices: CPU ranks.
        steps: optimizer steps.
        reduction: what the loss is over one batch.
    """
    from made_up import collate_padded, documents, train

    module = Supervised(reduction=reduction)
    train(module, documents(8 * steps), collate_padded, devices=devices, steps=steps, loss_normalization=reduction)


if __name__ == "__main__":
    from jsonargparse import CLI

    CLI(main)
