"""Policy optimization with clipped ratios and one advantage an answer: GRPO, DAPO, PPO's actor.

    python examples/grpo.py --devices 2
    python examples/grpo.py --devices 2 --normalization samples --kl_coefficient 0.04

Shows per-sample fields (advantages, temperatures) and per-token fields (log-probabilities of the policy that drew the
answers) in a batch, which are cut along with the samples; and both ways to average, each with the ``loss_normalization``
of the same name.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Literal

import lightning.pytorch as L
import torch
from torch import Tensor, nn

from lightning_dcp import Decoder
from lightning_dcp.batch.labels import Batch, shifted_labels
from lightning_dcp.loss import expand_samples, sample_means, token_log_probs, token_mean

Normalization = Literal["tokens", "samples"]


class GRPO(L.LightningModule):
    """Group relative policy optimization.

    With the ratio ``w = pi(token) / pi_old(token)`` and the advantage ``A`` of the answer, the loss of a token is
    ``-min(w A, clip(w, 1 - low, 1 + high) A) + kl_coefficient (exp(q) - q - 1)`` where ``q = log pi_ref - log pi``: PPO's
    clipped objective (equation 7 of arXiv:1707.06347) with the estimator k3 of the divergence from a reference
    (http://joschu.net/blog/kl-approx.html), as in GRPO (equations 3 and 4 of arXiv:2402.03300).

    A :class:`~lightning_dcp.PackedBatch` has per-token fields only: there, advantages and temperatures are given once a token.

    Tokens are averaged over the batch (``tokens``, as DAPO does, equation 8 of arXiv:2503.14476), or over each answer and
    then over answers (``samples``, as GRPO does).

    Batches are padded or packed (torch's nested tensors have no gradient of ``minimum``). They have ``input_ids``,
    ``labels`` (-100 where nothing is to be learnt, as in the prompt), ``advantages`` ``[B]``, and, if they like:

    - ``old_log_probs``, per token, each at the position that predicts it, as ``token_log_probs`` gives them; without, the
      policy is taken to be the one that drew the answers;
    - ``temperature`` ``[B]``, at which answers were drawn: logits are divided by it.

    Args:
        policy: ``policy(input_ids) -> logits``.
        reference: the same, frozen; a copy of the policy by default. Only with ``kl_coefficient``.
        normalization: what is averaged; give the strategy the same ``loss_normalization``.
        clip_low: how far a ratio may fall below 1 before it stops to count.
        clip_high: how far it may rise.
        kl_coefficient: weight of the divergence from the reference.
        learning_rate: AdamW's.
    """

    def __init__(
        self,
        policy: nn.Module | None = None,
        reference: nn.Module | None = None,
        *,
        normalization: Normalization = "tokens",
        clip_low: float = 0.2,
        clip_high: float = 0.2,
        kl_coefficient: float = 0.0,
        learning_rate: float = 1e-3,
    ) -> None:
        super().__init__()
        self.policy = Decoder(vocab_size=32, hidden_size=64, num_layers=2) if policy is None else policy
        self.reference = None
        if kl_coefficient:
            self.reference = (deepcopy(self.policy) if reference is None else reference).requires_grad_(False).eval()
        self.normalization, self.kl_coefficient = normalization, kl_coefficient
        self.clip_low, self.clip_high, self.learning_rate = clip_low, clip_high, learning_rate

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        counted = shifted_labels(batch) != -100
        log_probs = self.log_probs(self.policy, batch)
        old = batch["old_log_probs"] if "old_log_probs" in batch else log_probs.detach()
        # where nothing is learnt the ratio is 1, whatever the batch holds there
        ratio = torch.where(counted, log_probs - old, 0.0).exp()
        clipped = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        advantages = expand_samples(batch["advantages"], batch)
        losses = -torch.minimum(ratio * advantages, clipped * advantages)
        targets = int(counted.sum())
        self.log("clipped", token_mean((ratio != clipped).to(losses.dtype), counted), batch_size=targets)
        if self.reference is not None:
            kl = self.divergence(log_probs, batch)
            self.log("kl", token_mean(kl, counted), batch_size=targets)
            losses = losses + self.kl_coefficient * kl
        loss = self.averaged(losses, counted, batch)
        self.log("loss", loss)
        return loss

    def log_probs(self, model: nn.Module, batch: Batch) -> Tensor:
        """The log-probability of each token's successor at the answer's temperature, per token."""
        temperature = expand_samples(batch["temperature"], batch) if "temperature" in batch else 1.0
        return token_log_probs(model(batch["input_ids"]), shifted_labels(batch), temperature=temperature)

    def divergence(self, log_probs: Tensor, batch: Batch) -> Tensor:
        """An unbiased estimate of the divergence from the reference at each token, never below 0."""
        with torch.no_grad():
            reference = self.log_probs(self.reference, batch)
        away = reference - log_probs
        return away.exp() - away - 1

    def averaged(self, losses: Tensor, counted: Tensor, batch: Batch) -> Tensor:
        """The loss of the batch."""
        if self.normalization == "tokens":
            return token_mean(losses, counted)
        return sample_means(losses, counted, batch).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.policy.parameters(), lr=self.learning_rate)


def main(
    devices: int = 2, steps: int = 5, normalization: Normalization = "tokens", kl_coefficient: float = 0.0
) -> None:
    """Train a small model on made-up answers.

    Args:
        devices: CPU ranks.
        steps: optimizer steps.
        normalization: what is averaged.
        kl_coefficient: weight of the divergence from the reference.
    """
    from made_up import collate_rollouts, rollouts, train

    module = GRPO(normalization=normalization, kl_coefficient=kl_coefficient)
    options = {
        "loss_normalization": normalization,
        "regions": ["policy", "reference"] if kl_coefficient else ["policy"],
    }
    train(module, rollouts(8 * steps), collate_rollouts, devices=devices, steps=steps, **options)


if __name__ == "__main__":
    from jsonargparse import CLI

    CLI(main)
