"""``outputs="sharded"`` and ``"auto"``: a step that sees one rank's tokens gives what whole samples give, or is not used."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from datetime import timedelta
from functools import cache
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_dcp import next_token_loss
from lightning_dcp.batch.labels import shifted_labels
from lightning_dcp.data import COLLATORS
from tests.support.ranks import RankPool
from tests.support.training import VOCAB, RaggedTokens, Recorder, TinyModule, assert_same, trainer

LENGTHS = (60, 3, 30, 7, 1, 12, 5, 29, 2, 61, 16, 9, 13, 40, 4, 4, 8, 30)
LIMIT = {1: 64, 2: 32, 4: 16, 6: 16}


class TokenWise(TinyModule):
    """A head outside the region, a loss over tokens, and values logged with and without a weight of their own."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        torch.manual_seed(5)
        self.head = nn.Linear(VOCAB, VOCAB)
        nn.init.normal_(self.head.weight, std=0.3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.head(self.model(batch["input_ids"]))
        loss = next_token_loss(logits, batch)
        tokens = (logits.values() if logits.is_nested else logits).shape[:-1].numel()
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        self.log("twice", 2 * loss.detach())
        self.log("logit", 1.5, batch_size=tokens)
        return {"loss": loss, "thrice": 3 * loss.detach()}


class Summed(TinyModule):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.model(batch["input_ids"])
        ids = batch["input_ids"]
        scores = logits.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
        loss = 0.01 * (scores * batch["loss_mask"]).sum()
        self.log("train_loss", loss, reduce_fx="sum")
        return loss


class Masked(TinyModule):
    """A mean over the tokens of a mask, with float weights beside it."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        scores = self.model(batch["input_ids"]).square().mean(-1)
        mask = batch["loss_mask"]
        loss = (scores * mask).sum() / mask.sum()
        self.log("train_loss", loss)
        return loss


class OwnShift(TinyModule):
    """Shifts labels by itself, which cannot be done on a shard."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.model(batch["input_ids"])[:, :-1]
        loss = F.cross_entropy(logits.reshape(-1, VOCAB), batch["labels"][:, 1:].reshape(-1))
        self.log("train_loss", loss)
        return loss


class PerSampleField(TinyModule):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = next_token_loss(self.model(batch["input_ids"]), batch) * (1 + 0 * batch["number"].sum())
        self.log("train_loss", loss)
        return loss


class LogsASampleCount(TinyModule):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = next_token_loss(self.model(batch["input_ids"]), batch)
        self.log("train_loss", loss)
        self.log("rows", float(len(batch["input_ids"])), reduce_fx="sum", on_step=True, on_epoch=False)
        return loss


class Metered(TinyModule):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.mean = torchmetrics.MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = next_token_loss(self.model(batch["input_ids"]), batch)
        targets = (shifted_labels(batch) != -100).sum()
        self.mean(loss.detach(), weight=targets)
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        return loss


class Returning(TinyModule):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.model(batch["input_ids"])
        return {"loss": next_token_loss(logits, batch), "logits": logits.detach()}


class LogsByRows(TinyModule):
    """The loss under two names, with the number of rows: the commonest line of all."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = next_token_loss(self.model(batch["input_ids"]), batch)
        self.log("train_loss", loss, batch_size=batch["input_ids"].size(0), on_step=True, on_epoch=True)
        return loss


class OwnMask(TinyModule):
    """A sum over a mask with a name of the user's, of which fill tokens must have no part."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        scores = self.model(batch["input_ids"]).square().mean(-1)
        loss = 0.01 * (scores * batch["response_mask"]).sum()
        self.log("train_loss", loss, reduce_fx="sum")
        return loss


class ConstantWithoutTargets(TinyModule):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.model(batch["input_ids"])
        if "shift_labels" in batch and not (batch["shift_labels"] != -100).any():
            return torch.zeros((), dtype=logits.dtype)
        return next_token_loss(logits, batch)


class OneRankFails(TinyModule):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.model(batch["input_ids"])
        if "shift_labels" in batch and self.global_rank == 1:
            raise ValueError("this rank cannot")
        return next_token_loss(logits, batch)


class Data(RaggedTokens):
    """Random tokens, with a choice of fields; with ``few``, only the first two tokens of a sample are targets."""

    def __init__(self, kind: str) -> None:
        super().__init__(LENGTHS)
        for number, sample in enumerate(self.samples):
            if kind == "few":
                sample["labels"][3:] = -100
            if kind == "own mask":
                del sample["labels"]
                sample["response_mask"] = torch.ones(len(sample["input_ids"]), dtype=torch.float64)
            if kind == "mask":
                sample["loss_mask"] = (sample.pop("labels") != -100).double()
            if kind == "number":
                sample["number"] = torch.tensor(float(number))
            if kind == "shifted":
                sample["shift_labels"] = F.pad(sample.pop("labels")[1:], (0, 1), value=-100)


def collate(kind: str, fmt: str) -> Any:
    def joined(samples: list[dict[str, Any]]) -> Any:
        numbers = [sample.pop("number") for sample in map(dict, samples) if "number" in sample]
        batch = COLLATORS[fmt]([{k: v for k, v in sample.items() if k != "number"} for sample in samples])
        if numbers:
            batch["number"] = torch.stack(numbers)
        return batch

    return joined


def run(
    kind: type[TinyModule],
    data: str,
    fmt: str,
    strategy: dict[str, Any] | None,
    precision: str = "64-true",
    **options: Any,
) -> dict[str, Any]:
    recorder, module = Recorder(), kind()
    it = trainer(strategy=strategy, callbacks=[recorder], precision=precision, **options)
    batches = torch.utils.data.DataLoader(Data(data), batch_size=6, collate_fn=collate(data, fmt))
    it.fit(module, batches)
    return {
        "losses": recorder.losses,
        "gradients": recorder.gradients,
        "weights": {name: p.detach().clone() for name, p in module.named_parameters()},
        "logged": {name: float(value) for name, value in it.callback_metrics.items()},
        "sharded": getattr(getattr(it.strategy, "_outputs", None), "sharded", None),
    }


@pytest.fixture(scope="module")
def one_process(ranks: RankPool) -> Any:
    return cache(lambda kind, data, **options: ranks.run(run, 1, kind, data, "padded", None, **options)[0])


STATIC_ALL = {"dynamic_context_parallel": False}
ROWS = [
    ("tokens", TokenWise, "plain", "padded", {}),
    ("packed", TokenWise, "plain", "packed", {}),
    ("jagged", TokenWise, "plain", "jagged", {}),
    ("shifted labels", TokenWise, "shifted", "padded", {}),
    ("ranks without a target", TokenWise, "few", "padded", {}),
    ("static: fewer tokens than ranks", TokenWise, "plain", "packed", {"dynamic_context_parallel": False}),
    ("contiguous", TokenWise, "plain", "padded", {"layout": "contiguous"}),
    ("a mask", Masked, "mask", "padded", {}),
    ("fewer tokens than ranks, by a mask", OwnMask, "own mask", "packed", {"loss_normalization": "sum"} | STATIC_ALL),
    ("a sum", Summed, "mask", "packed", {"loss_normalization": "sum"}),
]


@pytest.mark.parametrize("world", [4, pytest.param(2, marks=pytest.mark.slow), pytest.param(6, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("kind", "data", "fmt", "strategy"),
    [
        pytest.param(
            *row[1:], marks=[pytest.mark.slow] * (row[0] in ("jagged", "contiguous", "shifted labels", "packed"))
        )
        for row in ROWS
    ],
    ids=[row[0] for row in ROWS],
)
def test_the_same_as_one_process(
    ranks: RankPool, one_process: Any, world: int, kind: Any, data: str, fmt: str, strategy: dict[str, Any]
) -> None:
    settings = {"max_seqlen_per_dp_cp_rank": LIMIT[world], "context_parallel_size": world, "outputs": "sharded"}
    for result in ranks.run(run, world, kind, data, fmt, settings | strategy):
        assert result.pop("sharded") is True
        assert_same(result, one_process(kind, data), 1e-9)


def test_float32_and_accumulation(ranks: RankPool, one_process: Any) -> None:
    settings = {"max_seqlen_per_dp_cp_rank": 16, "outputs": "auto"}
    options = {"precision": "32-true", "accumulate_grad_batches": 2}
    for result in ranks.run(run, 4, TokenWise, "plain", "packed", settings, **options):
        assert result.pop("sharded") is True
        assert_same(result, one_process(TokenWise, "plain", **options), 1e-5)


STATIC = {"dynamic_context_parallel": False, "context_parallel_size": 2}  # packs of several samples are cut, too
NEAR_REPEATS = ("a field of samples", "a tensor", "rows as batch size")
WITH_WHOLE_SAMPLES = [
    ("labels shifted by the step", OwnShift, "plain", {}, r"output loss differs|logged 'train_loss' differs"),
    ("a field of samples", PerSampleField, "number", {}, r"'number'\] holds no entry a token"),
    ("a number of rows", LogsASampleCount, "plain", STATIC, r"logged 'rows' differs"),
    ("rows as batch size", LogsByRows, "plain", STATIC, r"batch_size of the logged 'train_loss' differs"),
    ("a metric", Metered, "plain", {}, "torchmetrics objects are updated"),
    ("a tensor", Returning, "plain", {}, "returns a tensor that is no scalar"),
    (
        "a mean over samples",
        TokenWise,
        "plain",
        {"loss_normalization": "samples"},
        "a mean over samples cannot be added up",
    ),
]


@pytest.mark.parametrize(
    ("kind", "data", "strategy", "reason"),
    [pytest.param(*row[1:], marks=[pytest.mark.slow] * (row[0] in NEAR_REPEATS)) for row in WITH_WHOLE_SAMPLES],
    ids=[row[0] for row in WITH_WHOLE_SAMPLES],
)
def test_auto_keeps_whole_samples_where_sharded_steps_give_something_else(
    ranks: RankPool, one_process: Any, kind: Any, data: str, strategy: dict[str, Any], reason: str
) -> None:
    settings = {"max_seqlen_per_dp_cp_rank": 32} | strategy
    for automatic in ranks.run(run, 2, kind, data, "padded", settings | {"outputs": "auto"}):
        assert automatic.pop("sharded") is False
        if "loss_normalization" not in strategy:  # plain Lightning has a mean over tokens
            assert_same(automatic, one_process(kind, data), 1e-9)
    if kind is OwnShift:
        outcomes = ranks.run_all(run, 2, kind, data, "padded", settings | {"outputs": "sharded"})
        assert not any(ok for ok, _ in outcomes)
        assert re.search(rf"outputs='sharded': .*({reason})", outcomes[0][1])


def fit_twice() -> None:
    """A first run that agrees, and one in which a rank fails alone."""
    strategy = {"max_seqlen_per_dp_cp_rank": 32, "outputs": "auto"}
    assert run(TokenWise, "plain", "padded", strategy)["sharded"] is True
    os.environ["WORLD_SIZE"] = os.environ["TEST_WORLD_SIZE"]  # Lightning forgets it at the end of a run
    run(OneRankFails, "plain", "padded", strategy)


@pytest.fixture
def impatient(ranks: RankPool, monkeypatch: pytest.MonkeyPatch) -> Iterator[RankPool]:
    """Ranks that wait three seconds for the others of their group to fail as well."""
    monkeypatch.setattr("lightning_dcp.step.agreement.PATIENCE", timedelta(seconds=3))
    ranks.close()  # workers are forked with the shorter patience
    yield ranks
    ranks.close()


def test_a_rank_that_fails_alone_ends_the_run(impatient: RankPool) -> None:
    outcomes = impatient.run_all(fit_twice, 2, timeout=60)
    assert not any(ok for ok, _ in outcomes)
    assert "this rank cannot" in outcomes[1][1]
    assert "rank 1" in outcomes[0][1]


def test_a_constant_loss_on_a_rank_without_targets_ends_the_run(impatient: RankPool) -> None:
    settings = {"max_seqlen_per_dp_cp_rank": 16, "outputs": "sharded"}
    outcomes = impatient.run_all(run, 4, ConstantWithoutTargets, "few", "padded", settings, timeout=60)
    assert not any(ok for ok, _ in outcomes)
    assert any("returned a constant for tokens without targets" in text for _, text in outcomes)


def no_targets(strategy: dict[str, Any] | None) -> dict[str, Tensor]:
    module = TinyModule(optimizer="adamw", lr=0.1)
    data = Data("plain")
    for sample in data.samples[6:12]:  # the second of three batches
        sample["labels"] = torch.full_like(sample["labels"], -100)
    batches = torch.utils.data.DataLoader(data, batch_size=6, collate_fn=collate("plain", "padded"))
    trainer(strategy=strategy).fit(module, batches)
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def test_a_batch_without_targets_is_a_step_with_gradients_of_zero(ranks: RankPool) -> None:
    expected = ranks.run(no_targets, 1, None)[0]
    for outputs in ("gathered", "sharded"):
        for weights in ranks.run(no_targets, 2, {"max_seqlen_per_dp_cp_rank": 32, "outputs": outputs}):
            for name, weight in expected.items():
                torch.testing.assert_close(weights[name], weight, rtol=1e-9, atol=1e-9)


def test_one_rank_has_nothing_to_cut(ranks: RankPool, one_process: Any) -> None:
    result = ranks.run(run, 1, OwnShift, "plain", "padded", {"max_seqlen_per_dp_cp_rank": 64, "outputs": "sharded"})[0]
    assert result.pop("sharded") is None
    assert_same(result, one_process(OwnShift, "plain"), 1e-9)
