"""Distillation: a student learns the distribution of a frozen teacher, over the whole vocabulary or the teacher's top k.

    python examples/distillation.py --devices 2
    python examples/distillation.py --devices 2 --divergence reverse --temperature 2
    python examples/distillation.py --devices 2 --top_k 8

Shows two models of different sizes as regions. With ``top_k`` the teacher's region gives k numbers a token and not V, so that
is all that is gathered; batches may also bring them along, from a teacher that ran before.
"""

from __future__ import annotations

from typing import Literal

import lightning.pytorch as L
import torch
from torch import Tensor, nn

from lightning_dcp import Decoder
from lightning_dcp.batch.labels import Batch, shifted_labels
from lightning_dcp.loss import token_mean

Divergence = Literal["forward", "reverse"]


class TopK(nn.Module):
    """A language model that gives the k largest log-probabilities of each token, and of which tokens they are.

    Args:
        model: ``model(input_ids, position_ids) -> logits``.
        k: how many.
    """

    def __init__(self, model: nn.Module, k: int) -> None:
        super().__init__()
        self.model, self.k = model, k

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Token ids ``[B, T]`` to log-probabilities and ids, ``[B, T, k]`` each."""
        values, ids = self.model(input_ids, position_ids).log_softmax(-1).topk(self.k)
        return values, ids


class Distillation(L.LightningModule):
    """The divergence of a student's distribution ``q`` from a teacher's ``p``, averaged over targets.

    With logits divided by the temperature and the result multiplied by its square (arXiv:1503.02531):

    - ``forward``: ``KL(p || q) = sum_v p (log p - log q)``, which covers all that the teacher would say;
    - ``reverse``: ``KL(q || p)``, which keeps to what the teacher would say (arXiv:2306.08543);
    - ``top_k``: ``KL(p' || q)`` with ``p'`` the teacher's k likeliest tokens, made to sum up to 1. With k = V it is
      ``forward``; with few it is biased (arXiv:2503.16870 says how, and what helps).

    Args:
        student: ``student(input_ids) -> logits``.
        teacher: the same, frozen. With ``top_k`` it is wrapped in :class:`TopK`, and not called if batches hold
            ``teacher_log_probs`` and ``teacher_ids``, ``[B, T, k]`` each: log-probabilities at temperature 1 or logits.
        divergence: which one.
        top_k: k; over the whole vocabulary by default.
        temperature: of both.
        learning_rate: AdamW's.
    """

    def __init__(
        self,
        student: nn.Module | None = None,
        teacher: nn.Module | None = None,
        *,
        divergence: Divergence = "forward",
        top_k: int | None = None,
        temperature: float = 1.0,
        learning_rate: float = 1e-3,
    ) -> None:
        super().__init__()
        if top_k and divergence == "reverse":
            raise ValueError("divergence='reverse' needs the teacher's whole distribution; leave top_k out")
        self.student = Decoder(vocab_size=32, hidden_size=32, num_layers=1) if student is None else student
        teacher = Decoder(vocab_size=32, hidden_size=64, num_layers=2) if teacher is None else teacher
        self.teacher = (TopK(teacher, top_k) if top_k else teacher).requires_grad_(False).eval()
        self.divergence, self.top_k, self.temperature = divergence, top_k, temperature
        self.learning_rate = learning_rate

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        counted = shifted_labels(batch) != -100
        student = (self.student(batch["input_ids"]) / self.temperature).log_softmax(-1)
        losses = self.top_k_losses(student, batch) if self.top_k else self.full_losses(student, batch)
        loss = token_mean(losses * self.temperature**2, counted)
        entropy = token_mean(-(student.exp() * student).sum(-1), counted)
        self.log_dict({"loss": loss, "student_entropy": entropy})
        return loss

    def full_losses(self, student: Tensor, batch: Batch) -> Tensor:
        """The divergence at each token, from the student's log-probabilities ``[B, T, V]``."""
        with torch.no_grad():
            teacher = (self.teacher(batch["input_ids"]) / self.temperature).log_softmax(-1)
        if self.divergence == "forward":
            return (teacher.exp() * (teacher - student)).sum(-1)
        return (student.exp() * (student - teacher)).sum(-1)

    def top_k_losses(self, student: Tensor, batch: Batch) -> Tensor:
        """The divergence at each token, over the teacher's k likeliest."""
        if "teacher_log_probs" in batch:
            values, ids = batch["teacher_log_probs"], batch["teacher_ids"]
        else:
            with torch.no_grad():
                values, ids = self.teacher(batch["input_ids"])
        teacher = (values / self.temperature).log_softmax(-1)
        return (teacher.exp() * (teacher - student.gather(-1, ids))).sum(-1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.student.parameters(), lr=self.learning_rate)


def main(
    devices: int = 2,
    steps: int = 5,
    divergence: Divergence = "forward",
    top_k: int | None = None,
    temperature: float = 1.0,
) -> None:
    """Train a small student on made-up documents, with an untrained teacher.

    Args:
        devices: CPU ranks.
        steps: optimizer steps.
        divergence: which one.
        top_k: the teacher's likeliest tokens instead of the whole vocabulary.
        temperature: of teacher and student.
    """
    from made_up import collate_padded, documents, train

    module = Distillation(divergence=divergence, top_k=top_k, temperature=temperature)
    regions = ["student", "teacher"]
    train(module, documents(8 * steps), collate_padded, devices=devices, steps=steps, regions=regions)


if __name__ == "__main__":
    from jsonargparse import CLI

    CLI(main)
