"""Validation, test and prediction: numbers and outputs of one process, whatever the CP sizes."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import Tensor
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from lightning_dcp import next_token_loss
from lightning_dcp.batch.labels import shifted_labels
from tests.support.ranks import RankPool
from tests.support.training import VOCAB, RaggedTokens, TinyModule, loader, trainer

LENGTHS = (60, 3, 30, 7, 1, 12, 5, 29, 2, 61, 16, 9, 13)
STATIC = {"dynamic_context_parallel": False}


class MeasuredModule(TinyModule):
    """Logs losses per target, and torchmetrics objects."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(VOCAB, ignore_index=-100, average="micro")
        self.mean = MeanMetric()
        self.seen: list[int] = []

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits, targets = self.model(batch["input_ids"]), shifted_labels(batch)
        loss = next_token_loss(logits, batch)
        flat, flat_targets = _flat(logits), _flat(targets)
        self.log("val_loss", loss, batch_size=int((flat_targets != -100).sum()))
        self.accuracy.update(flat, flat_targets)
        self.mean.update(flat.double().logsumexp(-1), (flat_targets != -100).double())
        self.log("accuracy", self.accuracy)
        self.log("mean", self.mean)
        return loss

    test_step = validation_step


def _flat(x: Tensor) -> Tensor:
    x = x.values() if x.is_nested else x
    return x.flatten(0, 1) if (x.dim() > 1 and x.shape[0] == 1) or x.dim() == 3 or x.dtype == torch.long else x


def evaluate(fmt: str, strategy: dict[str, Any] | None, lengths: Any = LENGTHS, batch_size: int = 4) -> dict[str, Any]:
    module = MeasuredModule()
    run = trainer(strategy=strategy)
    metrics = run.validate(module, loader(lengths, batch_size, fmt), verbose=False)[0]
    metrics |= {f"test {k}": v for k, v in run.test(module, loader(lengths, batch_size, fmt), verbose=False)[0].items()}
    return metrics


@pytest.fixture(scope="module")
def expected(ranks: RankPool) -> dict[str, Any]:
    return ranks.run(evaluate, 1, "padded", None)[0]


@pytest.mark.parametrize("fmt", ["padded", "packed"])
@pytest.mark.parametrize(
    ("world", "strategy"),
    [
        pytest.param(1, {"max_seqlen_per_dp_cp_rank": 256}, marks=pytest.mark.slow),
        (2, {"max_seqlen_per_dp_cp_rank": 31}),
        (4, {"max_seqlen_per_dp_cp_rank": 16}),
        pytest.param(4, STATIC | {"context_parallel_size": 2, "max_seqlen_per_dp_cp_rank": 31}, marks=pytest.mark.slow),
        (4, STATIC | {"context_parallel_size": 4, "max_seqlen_per_dp_cp_rank": 16}),
        (4, STATIC | {"context_parallel_size": 1, "max_seqlen_per_dp_cp_rank": 61}),
    ],
)
def test_metrics_do_not_depend_on_cp_sizes(
    ranks: RankPool, expected: dict[str, Any], world: int, strategy: dict[str, Any], fmt: str
) -> None:
    for metrics in ranks.run(evaluate, world, fmt, strategy):
        assert metrics.keys() == expected.keys()
        for name, value in expected.items():
            # torchmetrics keeps its states in float32
            assert metrics[name] == pytest.approx(value, rel=1e-9 if "loss" in name else 1e-6), name


def test_a_set_smaller_than_the_world(ranks: RankPool) -> None:
    alone = ranks.run(evaluate, 1, "padded", None, (9, 5))[0]
    for metrics in ranks.run(evaluate, 4, "padded", {"max_seqlen_per_dp_cp_rank": 9}, (9, 5)):
        assert metrics["val_loss"] == pytest.approx(alone["val_loss"], rel=1e-9)


class PredictingModule(TinyModule):
    """Returns a bit of everything."""

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.model(batch["input_ids"])
        if "attention_mask" in batch:
            mask = batch["attention_mask"]
            return {
                "logits": logits * mask.unsqueeze(-1),
                "length": mask.sum(1),
                "text": [str(int(n)) for n in mask.sum(1)],
            }
        return {"logits": logits}


def predict(fmt: str, strategy: dict[str, Any] | None) -> list[Any]:
    module = PredictingModule()
    run = trainer(strategy=strategy)
    batches = run.predict(module, loader(LENGTHS, 4, fmt))
    assert batches is not None
    return [_plain(batch, fmt) for batch in batches]


def _plain(batch: Any, fmt: str) -> Any:
    logits = batch["logits"]
    rows = logits.unbind() if logits.is_nested else (logits[0] if fmt == "packed" else logits)
    return {**batch, "logits": list(rows) if isinstance(rows, tuple) else rows}


@pytest.mark.parametrize("fmt", ["padded", "packed", "jagged"])
@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_predictions_are_whole_and_in_order(ranks: RankPool, world: int, fmt: str) -> None:
    alone = ranks.run(predict, 1, fmt, None if fmt == "padded" else {"max_seqlen_per_dp_cp_rank": 512})[0]
    limit = 31 if world == 2 else 16
    for batches in ranks.run(predict, world, fmt, {"max_seqlen_per_dp_cp_rank": limit}):
        assert len(batches) == len(alone) == 4
        for ours, right in zip(batches, alone, strict=True):
            for own, whole in zip(ours["logits"], right["logits"], strict=True):
                torch.testing.assert_close(own, whole, rtol=1e-9, atol=1e-9)
            if fmt == "padded" and "length" in right:
                assert ours["length"].tolist() == right["length"].tolist()
                assert ours["text"] == right["text"]


def leak(fmt: str, world: int, mask: bool, cp_size: int) -> bool:
    """Whether the logits of samples stay bit-identical when every token of the first one changes."""
    module = TinyModule()
    strategy = STATIC | {"context_parallel_size": cp_size, "max_seqlen_per_dp_cp_rank": 64}
    outputs = []
    for change in (0, 1):
        data = RaggedTokens((13, 9, 13, 1))
        data.samples[0]["input_ids"] = (data.samples[0]["input_ids"] + change) % VOCAB
        data.samples[0]["labels"] = data.samples[0]["input_ids"]
        run = trainer(strategy=strategy)
        made = loader((1,), 4, fmt).collate_fn
        batches = run.predict(module, torch.utils.data.DataLoader(data, batch_size=4, collate_fn=made))
        logits = batches[0]
        whole = logits.values() if logits.is_nested else logits.flatten(0, 1)
        outputs.append(whole[13:])
    return bool(torch.equal(*outputs)) and not torch.equal(outputs[0][:5], outputs[0][5:10])


@pytest.mark.parametrize("fmt", ["padded", "packed", "jagged"])
@pytest.mark.parametrize(("world", "cp_size"), [(1, 1), pytest.param(2, 1, marks=pytest.mark.slow), (2, 2), (4, 4)])
def test_samples_do_not_leak_into_each_other(ranks: RankPool, world: int, cp_size: int, fmt: str) -> None:
    assert all(ranks.run(leak, world, fmt, world, False, cp_size))


def outputs_of(cp_size: int) -> Tensor:
    """Logits of documents of 7, 5, 1 and 13 tokens, at one CP size."""
    run = trainer(strategy=STATIC | {"context_parallel_size": cp_size, "max_seqlen_per_dp_cp_rank": 64})
    logits: Tensor = run.predict(TinyModule(), loader((7, 5, 1, 13), 4))[0]
    return logits


def test_outputs_are_those_of_one_rank_with_zeros_for_padding_and_repeat_bit_for_bit(ranks: RankPool) -> None:
    alone = ranks.run(outputs_of, 1, 1)[0]
    for size in (2, 4):
        first, second = (ranks.run(outputs_of, size, size)[0] for _ in range(2))
        torch.testing.assert_close(first, alone, rtol=1e-9, atol=1e-9)
        assert torch.equal(first, second)
        for row, length in enumerate((7, 5, 1, 13)):
            assert not first[row, length:].any()
            assert first[row, :length].all()


def steps_agree() -> tuple[float, float]:
    module = TinyModule(lr=0.0)
    run = trainer(strategy={"max_seqlen_per_dp_cp_rank": 16}, num_sanity_val_steps=1, limit_train_batches=1)
    run.fit(module, loader(LENGTHS, 20), loader(LENGTHS, 20))
    return float(run.callback_metrics["train_loss_step"]), float(run.callback_metrics["val_loss"])


def test_training_and_validation_step_agree_on_the_same_batch(ranks: RankPool) -> None:
    for train_loss, val_loss in ranks.run(steps_agree, 4):
        assert train_loss == pytest.approx(val_loss, rel=1e-12)


class TokenCounting(TinyModule):
    """Logs with the number of targets as batch size, as users do for a token mean over an epoch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = next_token_loss(self.model(batch["input_ids"]), batch)
        count = int((shifted_labels(batch) != -100).sum())
        self.log("train_loss", loss, on_step=True, on_epoch=True, batch_size=count)
        return loss


class Sums(L.Callback):
    """The token-weighted mean, made by hand from whole batches."""

    def __init__(self) -> None:
        self.loss = self.count = 0.0

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        count = int((shifted_labels(batch) != -100).sum())
        self.loss += float(outputs["loss"]) * count
        self.count += count


def epoch_mean() -> tuple[float, float]:
    sums = Sums()
    run = trainer(strategy={"max_seqlen_per_dp_cp_rank": 16}, callbacks=[sums])
    run.fit(TokenCounting(lr=0.1), loader(LENGTHS, 5, "packed"))
    return float(run.callback_metrics["train_loss_epoch"]), sums.loss / sums.count


def test_epoch_means_weigh_by_the_batch_size_given(ranks: RankPool) -> None:
    for logged, by_hand in ranks.run(epoch_mean, 4):
        assert logged == pytest.approx(by_hand, rel=1e-12)
