"""The table of losses: each example module with its variants, and how it is trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from examples.distillation import Distillation
from examples.dpo import DPO
from examples.grpo import GRPO
from examples.supervised import Supervised
from examples.value_head import ActorCritic, RewardModel
from lightning_dcp import Decoder
from lightning_dcp.batch.labels import shifted_labels
from lightning_dcp.loss import sample_sums, token_log_probs
from tests.support.training import VOCAB

HIDDEN = 16


def decoder(seed: int, *, kind: type[Decoder] = Decoder, layers: int = 1, spread: float = 0.3) -> Decoder:
    """A tiny model with larger weights than a fresh one's, so that attention is far from uniform."""
    torch.manual_seed(seed)
    model = kind(VOCAB, hidden_size=HIDDEN, num_layers=layers, num_heads=2, num_kv_heads=1, ffn_hidden_size=24)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=spread)
    return model


def trunk(seed: int) -> Decoder:
    """One that gives hidden states."""
    model = decoder(seed)
    model.head = nn.Identity()
    return model


class Masked(Decoder):
    """A model that takes a mask, as those of Transformers do; padding on the right needs none."""

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None
    ) -> Tensor:
        return super().forward(input_ids, position_ids)


class JoinedDPO(DPO):
    """Both answers in one call of a model, one below the other."""

    def log_probs(self, model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        widths = [batch[f"{kind}_input_ids"].shape[1] for kind in ("chosen", "rejected")]

        def joined(name: str, value: int) -> Tensor:
            parts = [batch[f"{kind}_{name}"] for kind in ("chosen", "rejected")]
            return torch.cat([F.pad(part, (0, max(widths) - part.shape[1]), value=value) for part in parts])

        answers = {
            "input_ids": joined("input_ids", 0),
            "labels": joined("labels", -100),
            "attention_mask": joined("attention_mask", 0),
        }
        logits = model(answers["input_ids"], attention_mask=answers["attention_mask"])
        chosen, rejected = sample_sums(token_log_probs(logits, shifted_labels(answers)), answers).chunk(2)
        return chosen, rejected


class LlamaDPO(DPO):
    """With models of Transformers."""

    def answer_log_probs(self, model: nn.Module, answers: Mapping[str, Tensor]) -> Tensor:
        logits = model(answers["input_ids"], attention_mask=answers["attention_mask"]).logits
        return sample_sums(token_log_probs(logits, shifted_labels(answers)), answers)


def llama(seed: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2
    )
    return LlamaForCausalLM(config)


def heads(make: Callable[[], L.LightningModule], seed: int = 8) -> L.LightningModule:
    """A module whose heads, too, are always the same."""
    torch.manual_seed(seed)
    return make()


def dpo(kind: type[DPO] = DPO, model: Callable[[int], nn.Module] = decoder, **options: Any) -> DPO:
    # a small beta: a step of SGD with lr 1 must not leave the numbers that float64 tells apart
    return kind(model(1), model(2), **({"beta": 0.05} | options))


def grpo(**options: Any) -> GRPO:
    return GRPO(decoder(1), decoder(2) if options.get("kl_coefficient") else None, **options)


def actor_critic(*, critic: bool = False) -> L.LightningModule:
    sizes = {"vocab_size": VOCAB, "hidden_size": HIDDEN}
    return heads(lambda: ActorCritic(trunk(1), trunk(3) if critic else None, **sizes))


def reward_model() -> L.LightningModule:
    return heads(lambda: RewardModel(trunk(1), hidden_size=HIDDEN))


def distillation(**options: Any) -> Distillation:
    return Distillation(decoder(1), decoder(2, layers=2), **options)


@dataclass(frozen=True)
class Row:
    """One loss: its module, what its batches are, and what it is over one batch."""

    make: Callable[[], L.LightningModule]
    batches: str
    normalization: str = "tokens"
    regions: tuple[str, ...] | None = None
    formats: tuple[str, ...] = ("padded", "packed")


BOTH = ("policy", "reference")
MODELS = ("student", "teacher")
OF_PAIRS: dict[str, Any] = {"batches": "pairs", "normalization": "samples", "formats": ("padded", "jagged")}

ROWS: dict[str, Row] = {
    "token mean": Row(lambda: Supervised(decoder(1)), "documents", formats=("padded", "packed", "jagged")),
    "sample mean": Row(lambda: Supervised(decoder(1), reduction="samples"), "documents", "samples"),
    "sum": Row(lambda: Supervised(decoder(1), reduction="sum"), "documents", "sum"),
    "dpo": Row(dpo, regions=BOTH, **OF_PAIRS),
    "dpo, smoothed, reference in the batch": Row(
        partial(dpo, label_smoothing=0.1), **OF_PAIRS | {"batches": "pairs with reference", "regions": ("policy",)}
    ),
    "dpo, both answers in one call": Row(
        partial(dpo, JoinedDPO, partial(decoder, kind=Masked)), regions=BOTH, **OF_PAIRS | {"formats": ("padded",)}
    ),
    "ipo": Row(partial(dpo, loss="ipo", beta=0.5), regions=BOTH, **OF_PAIRS),
    "grpo, token mean": Row(grpo, "rollouts", regions=("policy",)),
    "grpo, sample mean, kl": Row(
        partial(grpo, normalization="samples", kl_coefficient=0.1, clip_high=0.3), "rollouts", "samples", BOTH
    ),
    "value head": Row(actor_critic, "valued"),
    "critic": Row(partial(actor_critic, critic=True), "valued", regions=("policy", "critic")),
    "reward model": Row(reward_model, **OF_PAIRS),
    "distillation": Row(distillation, "documents", regions=MODELS),
    "distillation, reverse, temperature 2": Row(
        partial(distillation, divergence="reverse", temperature=2.0), "documents", regions=MODELS
    ),
    "distillation, top k": Row(partial(distillation, top_k=4), "documents", regions=MODELS),
    "distillation, top k in the batch": Row(
        partial(distillation, top_k=4, temperature=1.5), "taught", regions=("student",)
    ),
}

WITH_TRANSFORMERS = {
    "dpo, Llama": Row(partial(dpo, LlamaDPO, llama), **OF_PAIRS | {"formats": ("padded",)}),
}
