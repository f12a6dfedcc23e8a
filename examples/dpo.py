"""Preference optimization with a policy and a frozen reference: DPO and IPO.

    python examples/dpo.py --devices 2
    python examples/dpo.py --devices 2 --loss ipo --beta 0.3

Shows two regions in one module, one of them without gradients, and samples of two sequences each: a chosen and a rejected
answer, which always are in one pack. The loss is a mean over pairs: ``loss_normalization="samples"``.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Literal

import lightning.pytorch as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_dcp import Decoder
from lightning_dcp.batch.labels import shifted_labels
from lightning_dcp.loss import family, sample_sums, token_log_probs

PairLoss = Literal["sigmoid", "ipo"]


class DPO(L.LightningModule):
    """Direct preference optimization.

    With ``r(y) = log pi(y) - log pi_ref(y)``, summed over the tokens of an answer, and ``d = r(chosen) - r(rejected)``:

    - ``sigmoid``: ``-(1 - e) logsigmoid(beta d) - e logsigmoid(-beta d)`` (DPO, equation 7 of arXiv:2305.18290; with label
      smoothing ``e`` conservative DPO, https://ericmitchell.ai/cdpo.pdf: the share of pairs whose labels are wrong);
    - ``ipo``: ``(r(chosen) / n(chosen) - r(rejected) / n(rejected) - 1 / (2 beta))**2`` (equation 17 of arXiv:2310.12036).
      The division by the number of tokens ``n`` is TRL's, agreed on with the paper's authors.

    Args:
        policy: ``policy(input_ids) -> logits``; it is trained.
        reference: the same, frozen; a copy of the policy by default. Not called, if batches hold the log-probabilities of
            its answers, one a pair: ``ref_chosen_logps`` and ``ref_rejected_logps`` (TRL's names), ``[B]`` each.
        loss: which loss.
        beta: how far the policy may leave the reference.
        label_smoothing: ``e``, of ``sigmoid`` only.
        learning_rate: AdamW's.
    """

    def __init__(
        self,
        policy: nn.Module | None = None,
        reference: nn.Module | None = None,
        *,
        loss: PairLoss = "sigmoid",
        beta: float = 0.1,
        label_smoothing: float = 0.0,
        learning_rate: float = 1e-3,
    ) -> None:
        super().__init__()
        if loss == "ipo" and label_smoothing:
            raise ValueError(f"label_smoothing={label_smoothing} is for loss='sigmoid'")
        self.policy = Decoder(vocab_size=32, hidden_size=64, num_layers=2) if policy is None else policy
        self.reference = (deepcopy(self.policy) if reference is None else reference).requires_grad_(False).eval()
        self.loss, self.beta, self.label_smoothing, self.learning_rate = loss, beta, label_smoothing, learning_rate

    def training_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> Tensor:
        chosen, rejected = self.log_probs(self.policy, batch)
        ref_chosen, ref_rejected = self.reference_log_probs(batch)
        better, worse = chosen - ref_chosen, rejected - ref_rejected
        loss = self.pair_losses(better, worse, batch).mean()
        self.log("loss", loss)
        self.log("accuracy", (better > worse).to(loss.dtype).mean())
        self.log("margin", self.beta * (better - worse).mean())
        self.log("reward_chosen", self.beta * better.mean())
        self.log("reward_rejected", self.beta * worse.mean())
        return loss

    def log_probs(self, model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Log-probabilities of the chosen and the rejected answers, ``[B]`` each."""
        chosen, rejected = family(batch, "chosen_"), family(batch, "rejected_")
        return self.answer_log_probs(model, chosen), self.answer_log_probs(model, rejected)

    def answer_log_probs(self, model: nn.Module, answers: Mapping[str, Tensor]) -> Tensor:
        """The log-probability of each answer, ``[B]``: the sum over its targets."""
        # a model of Transformers: model(answers["input_ids"], attention_mask=answers["attention_mask"]).logits
        logits = model(answers["input_ids"])
        return sample_sums(token_log_probs(logits, shifted_labels(answers)), answers)

    def reference_log_probs(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Of the reference: from the batch, if it has them."""
        if "ref_chosen_logps" in batch:
            return batch["ref_chosen_logps"], batch["ref_rejected_logps"]
        with torch.no_grad():
            return self.log_probs(self.reference, batch)

    def pair_losses(self, better: Tensor, worse: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """The loss of each pair, ``[B]``, from the log-ratios of its answers."""
        if self.loss == "ipo":
            better, worse = better / num_targets(batch, "chosen_"), worse / num_targets(batch, "rejected_")
            return (better - worse - 1 / (2 * self.beta)) ** 2
        scaled = self.beta * (better - worse)
        return -(1 - self.label_smoothing) * F.logsigmoid(scaled) - self.label_smoothing * F.logsigmoid(-scaled)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.policy.parameters(), lr=self.learning_rate)


def num_targets(batch: Mapping[str, Tensor], prefix: str) -> Tensor:
    """Targets of each answer, at least 1, ``[B]``."""
    answers = family(batch, prefix)
    return sample_sums((shifted_labels(answers) != -100).float(), answers).clamp(min=1)


def main(
    devices: int = 2, steps: int = 5, loss: PairLoss = "sigmoid", beta: float = 0.1, label_smoothing: float = 0.0
) -> None:
    """Train a small model on made-up pairs.

    Args:
        devices: CPU ranks.
        steps: optimizer steps.
        loss: which loss.
        beta: how far the policy may leave the reference.
        label_smoothing: the share of pairs whose labels are wrong.
    """
    from made_up import collate_pairs, pairs, train

    module = DPO(loss=loss, beta=beta, label_smoothing=label_smoothing)
    options = {"loss_normalization": "samples", "regions": ["policy", "reference"]}
    train(module, pairs(8 * steps), collate_pairs, devices=devices, steps=steps, **options)


if __name__ == "__main__":
    from jsonargparse import CLI

    CLI(main)
