"""Small Hugging Face models of every family in folders, what transformers computes with them, and runs of their imports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_dcp import MegatronGPT, next_token_loss
from tests.support.training import VOCAB, RaggedTokens, loader, trainer

LENGTHS = (13, 5, 9, 3)
SIZES = {
    "vocab_size": VOCAB + 7,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "attn_implementation": "sdpa",
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
"""Frequencies of a head of 8: one that stays, some between, one that is slowed down."""
EXPERTS = {"num_experts_per_tok": 2}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "head_dim": 8, "rope_scaling": LLAMA3, "rope_theta": LLAMA3["rope_theta"]},
    "llama-tied": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "mistral": {"sliding_window": 4, "rms_norm_eps": 1e-4},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 2, "sliding_window": 4, "tie_word_embeddings": True},
    "qwen3": {"head_dim": 8, "rope_theta": 1e6, "num_attention_heads": 8},
    "mixtral": {"num_local_experts": 4, **EXPERTS},
    "qwen3_moe": {
        **EXPERTS,
        "num_experts": 4,
        "moe_intermediate_size": 12,
        "head_dim": 8,
        "mlp_only_layers": [1],
        "norm_topk_prob": False,
    },
}


class InDouble(TorchFunctionMode):
    """Norms of transformers compute in float32, whatever the model's dtype; inside, in float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.to and args[1:] == (torch.float32,) and args[0].dtype == torch.float64:
            return args[0]
        return func(*args, **(kwargs or {}))


def make(name: str, folder: Path) -> None:
    """Save a model with weights far from zero, biases and norms among them."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(name.removesuffix("-tied"), **(SIZES | MODELS[name]))
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, mean=1.0 if weight.dim() == 1 else 0.0, std=0.3)
    model.save_pretrained(folder, max_shard_size="8KB")


def read(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # grouped products know no float64
    return model


def samples() -> list[dict[str, Any]]:
    return RaggedTokens(LENGTHS).samples


def logits(model: Any) -> list[Tensor]:
    """Of each sample by itself, ``[T, vocabulary]``."""
    with torch.no_grad(), InDouble():
        return [model(input_ids=s["input_ids"][None], use_cache=False).logits[0] for s in samples()]


def expected(folder: Path, name: str) -> list[Tensor]:
    """Make a model, and what transformers gives: its logits; and in ``trained`` its weights after an SGD step of lr 1."""
    make(name, folder)
    model = read(folder)
    given = logits(model)
    losses = []
    with InDouble():
        for s in samples():
            out = model(input_ids=s["input_ids"][None], use_cache=False).logits[0]
            losses.append(F.cross_entropy(out[:-1], s["labels"][1:], reduction="none"))
        wanted = torch.cat([s["labels"][1:] != -100 for s in samples()])
        torch.cat(losses)[wanted].mean().backward()
    with torch.no_grad():
        for weight in model.parameters():
            weight -= weight.grad
    model.save_pretrained(folder / "trained")
    return given


def tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder."""
    from safetensors.torch import load_file

    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


class Imported(MegatronGPT):
    """Gives logits, writes itself to a folder, trains one SGD step of lr 1."""

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model(input_ids=batch["input_ids"])

    def _loss(self, batch: Any) -> tuple[Tensor, int]:
        return next_token_loss(self.model(input_ids=batch["input_ids"]), batch), 1

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def convert(folder: Path, out: Path, strategy: dict[str, Any], train: bool = False) -> list[Tensor]:
    """Logits of an import, which is then written to ``out``, and trained and written to ``out / trained`` if wanted."""
    model = Imported.from_huggingface(folder, config={"moe_router_dtype": "fp64"})
    run = trainer(strategy=strategy)
    (predicted,) = run.predict(model, loader(LENGTHS, len(LENGTHS), "packed"))
    model.save_huggingface(out, dtype=torch.float32)
    if train:
        trainer(strategy=strategy).fit(model, loader(LENGTHS, len(LENGTHS), "packed"))
        model.save_huggingface(out / "trained", max_shard_bytes=6_000)
    return list(predicted[0].split(LENGTHS))
