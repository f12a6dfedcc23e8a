"""Fine-tuning a Hugging Face causal language model, whole or by LoRA; an ordinary LightningModule.

Without a name it trains a tiny Llama with random weights, so nothing is downloaded (with LoRA, such a model, frozen, learns
little):

    pip install -c constraints.txt -e '.[hf]'
    python examples/huggingface.py --devices 2
    python examples/huggingface.py --name Qwen/Qwen3-0.6B --lora true --fused true
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as L
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig


class FineTuning(L.LightningModule):
    """Next-token training of a causal language model on padded batches.

    Args:
        name: of the weights, on the Hugging Face hub or in a folder; a tiny random Llama without.
        vocab_size: of the tiny model.
        lora: train only low-rank updates of the attention layers (arXiv:2106.09685).
        learning_rate: of AdamW.
    """

    def __init__(
        self, name: str | None = None, *, vocab_size: int = 32, lora: bool = False, learning_rate: float = 3e-3
    ) -> None:
        super().__init__()
        self.model: Any = AutoModelForCausalLM.from_pretrained(name) if name else tiny_llama(vocab_size)
        if lora:
            self.model = get_peft_model(
                self.model, LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"])
            )
        self.learning_rate = learning_rate

    def training_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> Tensor:
        out = self.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=batch["labels"])
        self.log("train_loss", out.loss, prog_bar=True)
        return out.loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.AdamW(trained, lr=self.learning_rate)


def tiny_llama(vocab_size: int) -> Any:
    """A Llama of two layers with random weights."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=vocab_size, num_key_value_heads=2, **sizes))


def main(devices: int = 2, steps: int = 5, name: str | None = None, lora: bool = False, fused: bool = False) -> None:
    """Train a model on sequences that count.

    Args:
        devices: CPU ranks.
        steps: optimizer steps.
        name: of the weights; a tiny random Llama without.
        lora: train only low-rank updates.
        fused: compute the loss without logits.
    """
    from made_up import VOCAB, collate_padded, documents, train

    module = FineTuning(name, vocab_size=VOCAB, lora=lora)
    options = {"outputs": "auto", "fused_linear_cross_entropy": fused}
    train(module, documents(8 * steps), collate_padded, devices=devices, steps=steps, **options)


if __name__ == "__main__":
    from jsonargparse import CLI

    CLI(main)
