"""A Hugging Face model with the fused loss: no tensor of all logits, and less memory on more ranks."""

from __future__ import annotations

import os
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig

from lightning_dcp.data import collate_packed
from tests.attention.tracking import TensorWatch
from tests.support.ranks import RankPool
from tests.support.training import trainer

TOKENS, VOCABULARY = 4096, 32768


class Llama(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=TOKENS,
            tie_word_embeddings=True,
        )
        self.model = AutoModelForCausalLM.from_config(config)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(input_ids=batch["input_ids"], labels=batch["labels"]).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Watching(L.Callback):
    """Watches the tensors of the training step, its backward included."""

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        self.watch = TensorWatch()
        self.watch.__enter__()

    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor) -> None:
        self.watch.__exit__(None, None, None)


def watched(*, fused: bool) -> tuple[int, int]:
    """Elements of the largest tensor, and the most bytes at one time, on this rank."""
    ids = torch.randint(0, VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(0))
    strategy = {"fused_linear_cross_entropy": fused, "dynamic_context_parallel": False}
    strategy |= {"context_parallel_size": int(os.environ["TEST_WORLD_SIZE"])}
    watching = Watching()
    run = trainer(strategy=strategy, precision="32-true", callbacks=[watching])
    run.fit(Llama(), DataLoader([{"input_ids": ids, "labels": ids}], batch_size=1, collate_fn=collate_packed))
    return watching.watch.largest, watching.watch.peak


@pytest.fixture(scope="module")
def alone(ranks: RankPool) -> tuple[int, int]:
    return ranks.run(watched, 1, fused=True)[0]


def test_no_tensor_has_as_many_elements_as_all_logits(alone: tuple[int, int]) -> None:
    assert alone[0] < TOKENS * VOCABULARY / 8


def test_the_peak_on_four_ranks_is_below_two_fifths_of_that_on_one(ranks: RankPool, alone: tuple[int, int]) -> None:
    assert max(peak for _, peak in ranks.run(watched, 4, fused=True)) < 0.4 * alone[1]


@pytest.mark.slow
def test_without_the_switch_there_are_all_logits(ranks: RankPool) -> None:
    assert ranks.run(watched, 1, fused=False)[0][0] >= TOKENS * VOCABULARY
