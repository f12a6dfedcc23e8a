"""Heads that give one number: an actor with a critic (PPO), and a reward model.

    python examples/value_head.py --devices 2
    python examples/value_head.py --devices 2 --kind critic
    python examples/value_head.py --devices 2 --kind reward

Shows a region that gives hidden states, with heads outside it that see whole samples; log-probabilities from hidden states,
without ever holding all logits; and a second trained region (``critic``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import lightning.pytorch as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_dcp import Decoder
from lightning_dcp.batch.labels import Batch, shifted_labels
from lightning_dcp.loss import family, last_tokens, linear_log_probs, token_mean


def trunk(vocab_size: int = 32, hidden_size: int = 64) -> nn.Module:
    """A decoder without its head: ``trunk(input_ids) -> hidden states [B, T, hidden]``."""
    decoder = Decoder(vocab_size, hidden_size=hidden_size, num_layers=2, tie_embeddings=False)
    decoder.head = nn.Identity()
    return decoder


class ActorCritic(L.LightningModule):
    """PPO (arXiv:1707.06347): an actor with clipped ratios, and a critic that is fitted to returns.

    Losses of a token, both averaged over the tokens of the batch that are targets, with the ratio ``w = pi / pi_old``, the
    advantage ``A``, the value ``v``, the value ``u`` when the answer was drawn, and the return ``R``:

    - actor: ``-min(w A, clip(w, 1 - clip, 1 + clip) A)`` (equation 7);
    - critic: ``max((v - R)**2, (u + clip(v - u, -value_clip, value_clip) - R)**2) / 2`` (OpenAI Baselines' PPO2; see detail 9
      of https://iclr-blog-track.github.io/2022/03/25/ppo-implementation-details/).

    Batches have ``input_ids``, ``labels`` and, per token at the position that predicts it, ``old_log_probs``, ``advantages``,
    ``old_values`` and ``returns``.

    Args:
        policy: ``policy(input_ids) -> hidden states``.
        critic: the same, for the value head; the policy's own hidden states by default.
        vocab_size: of the language-model head.
        hidden_size: of the hidden states.
        clip: how far a ratio may leave 1 before it stops to count.
        value_clip: how far a value may leave the old one before it stops to count.
        value_coefficient: weight of the critic's loss.
        learning_rate: AdamW's.
    """

    def __init__(
        self,
        policy: nn.Module | None = None,
        critic: nn.Module | None = None,
        *,
        vocab_size: int = 32,
        hidden_size: int = 64,
        clip: float = 0.2,
        value_clip: float = 0.2,
        value_coefficient: float = 0.5,
        learning_rate: float = 1e-3,
    ) -> None:
        super().__init__()
        self.policy = trunk(vocab_size, hidden_size) if policy is None else policy
        self.critic = critic
        self.lm_head = nn.Linear(hidden_size, vocab_size, bias=False)
        self.value_head = nn.Linear(hidden_size, 1)
        self.clip, self.value_clip, self.value_coefficient = clip, value_clip, value_coefficient
        self.learning_rate = learning_rate

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        targets = shifted_labels(batch)
        counted = targets != -100
        hidden = self.policy(batch["input_ids"])
        seen = hidden if self.critic is None else self.critic(batch["input_ids"])
        log_probs = linear_log_probs(hidden, self.lm_head.weight, targets).log_prob
        actor = token_mean(self.actor_losses(log_probs, counted, batch), counted)
        critic = token_mean(self.critic_losses(self.value_head(seen).squeeze(-1), batch), counted)
        loss = actor + self.value_coefficient * critic
        self.log_dict({"loss": loss, "actor": actor, "critic": critic})
        return loss

    def actor_losses(self, log_probs: Tensor, counted: Tensor, batch: Batch) -> Tensor:
        """Of each token."""
        ratio = torch.where(counted, log_probs - batch["old_log_probs"], 0.0).exp()
        clipped = ratio.clamp(1 - self.clip, 1 + self.clip)
        return -torch.minimum(ratio * batch["advantages"], clipped * batch["advantages"])

    def critic_losses(self, values: Tensor, batch: Batch) -> Tensor:
        """Of each token."""
        old, returns = batch["old_values"], batch["returns"]
        near = old + (values - old).clamp(-self.value_clip, self.value_clip)
        return torch.maximum((values - returns) ** 2, (near - returns) ** 2) / 2

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)


class RewardModel(L.LightningModule):
    """A score for each answer, learnt from pairs (Bradley-Terry, equation 1 of arXiv:2203.02155).

    The score is that of the answer's last token. The loss of a pair is ``-logsigmoid(score(chosen) - score(rejected))``,
    averaged over pairs: ``loss_normalization="samples"``.

    Args:
        model: ``model(input_ids) -> hidden states``.
        hidden_size: of the hidden states.
        learning_rate: AdamW's.
    """

    def __init__(self, model: nn.Module | None = None, *, hidden_size: int = 64, learning_rate: float = 1e-3) -> None:
        super().__init__()
        self.model = trunk(hidden_size=hidden_size) if model is None else model
        self.score = nn.Linear(hidden_size, 1, bias=False)
        self.learning_rate = learning_rate

    def training_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> Tensor:
        chosen, rejected = (self.scores(family(batch, prefix)) for prefix in ("chosen_", "rejected_"))
        loss = -F.logsigmoid(chosen - rejected).mean()
        self.log_dict({"loss": loss, "accuracy": (chosen > rejected).to(loss.dtype).mean()})
        return loss

    def scores(self, answers: Mapping[str, Tensor]) -> Tensor:
        """The score of each answer, ``[B]``."""
        return self.score(last_tokens(self.model(answers["input_ids"]), answers)).squeeze(-1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)


def main(devices: int = 2, steps: int = 5, kind: Literal["head", "critic", "reward"] = "head") -> None:
    """Train a small model on made-up answers.

    Args:
        devices: CPU ranks.
        steps: optimizer steps.
        kind: a value head on the policy, a critic of its own, or a reward model.
    """
    from made_up import collate_pairs, collate_rollouts, pairs, train, valued_rollouts

    shared = {"devices": devices, "steps": steps}
    if kind == "reward":
        train(RewardModel(), pairs(8 * steps), collate_pairs, loss_normalization="samples", **shared)
        return
    module = ActorCritic(critic=trunk() if kind == "critic" else None)
    regions = ["policy", "critic"] if kind == "critic" else ["policy"]
    train(module, valued_rollouts(8 * steps), collate_rollouts, regions=regions, **shared)


if __name__ == "__main__":
    from jsonargparse import CLI

    CLI(main)
