"""Calls of a region: several in a step, about other sequences than the batch's, and under checkpointing."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.support.ranks import RankPool
from tests.support.training import VOCAB, Recorder, TinyModule, assert_same, loader, trainer

LENGTHS = (60, 3, 30, 7, 2, 12, 5, 29, 2, 61, 16, 9)
LIMIT = {1: 64, 2: 32, 4: 16}


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.reshape(-1, VOCAB), labels.reshape(-1))


class Shortened(TinyModule):
    """Gives all tokens but the last column, as many training scripts do."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = cross_entropy(self.model(batch["input_ids"][:, :-1]), batch["labels"][:, 1:])
        self.log("train_loss", loss)
        return loss


class Layers(nn.Module):
    """Attention layers that are called again in the backward, or not; a mask only as one of any arguments."""

    def __init__(self, use_reentrant: bool | None = None) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.embedding, self.head = nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB)
        self.layers = nn.ModuleList([nn.Linear(8, 24) for _ in range(2)])
        self.dropout = nn.Dropout(0.0)

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, **others: Any) -> Tensor:
        if others.get("attention_mask") is not None:
            raise ValueError("a mask came in, though borders are kept without one")
        x = self.embedding(input_ids)
        for layer in self.layers:
            attend = partial(self._attend, layer)
            x = attend(x) if self.use_reentrant is None else checkpoint(attend, x, use_reentrant=self.use_reentrant)
        return self.head(self.dropout(x))

    def _attend(self, layer: nn.Module, x: Tensor) -> Tensor:
        q, k, v = (part.unsqueeze(1) for part in layer(x).chunk(3, dim=-1))
        return x + F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1)


class SeveralCalls(TinyModule):
    """The same number of tokens on a rank in each call, but other borders: rows as they are, reversed, and joined."""

    def __init__(self, use_reentrant: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.model = Layers(use_reentrant)
        for parameter in self.model.parameters():
            nn.init.normal_(parameter, std=0.5)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ids, mask, labels = batch["input_ids"], batch["attention_mask"], batch["labels"]
        own = self.model(ids)
        turned = self.model(ids.flip(1), attention_mask=mask.flip(1)).flip(1)  # padded on the left
        joined = self.model(torch.cat([ids, ids.flip(1)]), attention_mask=torch.cat([mask, mask.flip(1)]))
        both, back = joined.chunk(2)
        scores = own + 2 * turned + own * both - 3 * back.flip(1)
        loss = cross_entropy(scores[:, :-1], labels[:, 1:])
        self.log("train_loss", loss)
        return loss


def run(kind: Any, strategy: dict[str, Any] | None, **options: Any) -> dict[str, Any]:
    recorder, module = Recorder(), kind()
    it = trainer(strategy=strategy, callbacks=[recorder], **options)
    it.fit(module, loader(LENGTHS, 6))
    weights = {name: p.detach().clone() for name, p in module.named_parameters()}
    logged = {name: float(value) for name, value in it.callback_metrics.items()}
    return {"losses": recorder.losses, "gradients": recorder.gradients, "weights": weights, "logged": logged}


def by_rows(kind: Any) -> dict[str, Any]:
    """One process in which padding on the left is masked by hand, as plain causal attention sees it."""
    forward = Layers.forward

    def rows(self: Layers, input_ids: Tensor, position_ids: Tensor | None = None, **others: Any) -> Tensor:
        mask = others.get("attention_mask")
        if mask is None:
            return forward(self, input_ids)
        out = torch.zeros(*input_ids.shape, VOCAB, dtype=torch.float64)
        for row, real in enumerate(mask.bool()):
            out[row, real] = forward(self, input_ids[row, real].unsqueeze(0))[0]
        return out

    Layers.forward = rows  # type: ignore[method-assign]
    try:
        return run(kind, None)
    finally:
        Layers.forward = forward  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def one_process(ranks: RankPool) -> Any:
    return cache(lambda kind: ranks.run(by_rows, 1, kind)[0])


@pytest.mark.parametrize("world", [4, pytest.param(2, marks=pytest.mark.slow)])
def test_columns_of_the_batch(ranks: RankPool, one_process: Any, world: int) -> None:
    for result in ranks.run(run, world, Shortened, {"max_seqlen_per_dp_cp_rank": LIMIT[world]}):
        assert_same(result, one_process(Shortened), 1e-9)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_other_sequences_than_the_batchs(ranks: RankPool, one_process: Any, size: int) -> None:
    strategy = {"dynamic_context_parallel": False, "context_parallel_size": size, "max_seqlen_per_dp_cp_rank": 256}
    for result in ranks.run(run, 4, SeveralCalls, strategy):
        assert_same(result, one_process(SeveralCalls), 1e-9)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_layers_find_the_sequences_of_their_call(
    ranks: RankPool, one_process: Any, use_reentrant: bool
) -> None:
    strategy = {"dynamic_context_parallel": False, "context_parallel_size": 4, "max_seqlen_per_dp_cp_rank": 256}
    for result in ranks.run(run, 4, partial(SeveralCalls, use_reentrant), strategy):
        assert_same(result, one_process(SeveralCalls), 1e-9)


class Dropped(SeveralCalls):
    """Dropout inside the region, and the region inside a checkpoint of the step's."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.model.dropout.p, self.checkpointed = 0.5, checkpointed

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ids = batch["input_ids"]
        call = partial(checkpoint, self.model, use_reentrant=False) if self.checkpointed else self.model
        return cross_entropy((call(ids) * call(ids))[:, :-1], batch["labels"][:, 1:])


def seeded_run(checkpointed: bool) -> dict[str, Any]:
    L.seed_everything(11)
    return run(partial(Dropped, checkpointed), {"max_seqlen_per_dp_cp_rank": 32}, max_steps=1)


def test_a_checkpoint_around_a_region_draws_the_same_dropout_again(ranks: RankPool) -> None:
    expected = ranks.run(seeded_run, 2, False)
    for result, right in zip(ranks.run(seeded_run, 2, True), expected, strict=True):
        assert_same(result | {"logged": {}}, right | {"logged": {}}, 1e-9)
