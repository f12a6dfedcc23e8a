"""torchmetrics objects in the user's module have the values of one process of plain Lightning."""

from __future__ import annotations

import re
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import Tensor
from torchmetrics import CatMetric, MaxMetric, MeanMetric, Metric, MetricCollection, PearsonCorrCoef, SumMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassF1Score, MulticlassPrecision
from torchmetrics.retrieval import RetrievalMRR
from torchmetrics.wrappers import MinMaxMetric, Running

from lightning_dcp import next_token_loss
from lightning_dcp.batch.labels import shifted_labels
from lightning_dcp.errors import BatchError
from tests.support.ranks import RankPool
from tests.support.training import VOCAB, TinyModule, loader, trainer

LENGTHS = (60, 3, 30, 7, 1, 12, 5, 29, 2, 61, 16, 9, 13, 40, 4, 4, 8, 30)
VALIDATION = (9, 31, 2, 5, 22)
LIMIT = {1: 64, 2: 32, 4: 16}


def token_scores(module: TinyModule, batch: Any) -> tuple[Tensor, Tensor]:
    """Logits and targets of the tokens that have a target.

    Rounded: equal first tokens of two samples have equal logits in one process, and ranking metrics count ties.
    """
    logits, targets = module.model(batch["input_ids"]), shifted_labels(batch)
    kept = targets != -100
    return (logits[kept].detach() * 1e6).round() / 1e6, targets[kept]


def scores(prefix: str) -> MetricCollection:
    """Two metrics that share a state, and one that does not."""
    return MetricCollection(
        {
            "f1": MulticlassF1Score(VOCAB, average="macro"),
            "precision": MulticlassPrecision(VOCAB, average="macro"),
            "accuracy": MulticlassAccuracy(VOCAB, average="micro"),
        },
        prefix=prefix,
    )


class Measured(TinyModule):
    """Called, updated, collected and wrapped metrics, logged on steps and epochs."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.called = MulticlassAccuracy(VOCAB, average="macro")
        self.step_only = MeanMetric()
        self.updated = MeanMetric()
        self.called_twice = SumMetric()
        self.correlation = PearsonCorrCoef()
        self.longest = MaxMetric()
        self.area = MulticlassAUROC(VOCAB, average="macro")
        self.running, self.running_called = Running(SumMetric(), window=2), Running(MeanMetric(), window=3)
        self.rank = RetrievalMRR()
        self.by_hand = SumMetric()
        self.collection, self.collection_called = scores("updated/"), scores("called/")
        self.val_accuracy, self.val_area = MulticlassAccuracy(VOCAB, average="micro"), MulticlassAUROC(VOCAB)
        self.val_scores, self.val_running = scores("val/"), Running(SumMetric(), window=2)
        self.extremes, self.values = MinMaxMetric(MeanMetric()), CatMetric()
        self.seen: list[dict[str, Any]] = []
        for child in self.modules():
            if isinstance(child, Metric):
                child.set_dtype(torch.float64)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = next_token_loss(self.model(batch["input_ids"]), batch)
        logits, targets = token_scores(self, batch)
        lengths = batch["attention_mask"].sum(1).double()
        both: dict[str, Any] = {"on_step": True, "on_epoch": True}
        accuracy = self.called(logits, targets)
        self.log("called", self.called, **both)
        self.log("value of a call", accuracy.detach() * 0 + 2.0)
        self.step_only(lengths)
        self.log("step only", self.step_only)
        self.updated.update(lengths)
        self.log("updated", self.updated, **both)
        self.called_twice(lengths)
        self.called_twice(lengths * 10)
        self.log("called twice", self.called_twice, prog_bar=True, **both)
        if len(targets) > 0:
            self.correlation(logits[:, 0].contiguous(), targets.double())
        self.log("correlation", self.correlation, **both)
        self.longest(lengths)
        self.log("longest", self.longest, **both)
        self.area(logits, targets)
        self.log("area", self.area, **both)
        self.running.update(lengths)
        self.running_called(lengths)
        self.log("running", self.running, on_step=False, on_epoch=True)
        self.log("running called", self.running_called, on_step=False, on_epoch=True)
        self.collection.update(logits, targets)
        self.log_dict(self.collection, on_step=False, on_epoch=True)
        self.collection_called(logits, targets)
        self.log_dict(self.collection_called, **both)
        self.by_hand.update(lengths)
        self.rank.update(logits[:, 0], targets > 8, indexes=targets % 3)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("by hand", self.by_hand.compute(), on_step=True, on_epoch=False)
        if batch_idx == 1:
            self.by_hand.reset()

    def on_train_epoch_end(self) -> None:
        self.log("rank", self.rank.compute())
        self.rank.reset()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits, targets = token_scores(self, batch)
        lengths = batch["attention_mask"].sum(1).double()
        self.val_accuracy(logits, targets)
        self.log("val accuracy", self.val_accuracy)
        self.val_area.update(logits, targets)
        self.val_scores(logits, targets)
        self.log_dict(self.val_scores, on_step=True, on_epoch=True)
        self.val_running(lengths)
        self.log("val running", self.val_running)
        self.extremes.update(lengths)
        self.values.update(lengths)

    test_step = validation_step

    def on_validation_epoch_end(self) -> None:
        self.log("val area", self.val_area.compute())
        self.log_dict({f"extremes {key}": value for key, value in self.extremes.compute().items()})
        self.seen.append({"values": sorted(self.values.compute().reshape(-1).tolist())})
        for metric in (self.val_area, self.values):
            metric.reset()

    on_test_epoch_end = on_validation_epoch_end


class Watching(L.Callback):
    """Keeps what the trainer shows after each batch."""

    def __init__(self) -> None:
        self.shown: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.shown.append({key: float(value) for key, value in trainer.callback_metrics.items()})
        self.shown[-1] |= {f"bar {key}": float(value) for key, value in trainer.progress_bar_metrics.items()}


def measured(strategy: dict[str, Any] | None, validation: Any = VALIDATION) -> dict[str, Any]:
    watching, module = Watching(), Measured(lr=0.05)
    run = trainer(strategy=strategy, max_epochs=2, callbacks=[watching], num_sanity_val_steps=2)
    run.fit(module, loader(LENGTHS, 5), loader(validation, 3))
    ends = {key: float(value) for key, value in run.callback_metrics.items()}
    tested = run.test(module, loader(validation, 2), verbose=False)
    return {"shown": watching.shown, "end": ends, "tested": tested[0], "seen": module.seen}


def assert_equal(ours: dict[str, Any], expected: dict[str, Any], at: Any = "") -> None:
    assert list(ours) == list(expected), at
    for key, value in expected.items():
        exact = 1e-6 if "area" in key else 1e-9  # torchmetrics adds up areas in float32
        assert ours[key] == pytest.approx(value, rel=exact, abs=exact, nan_ok=True), (at, key)


@pytest.fixture(scope="module")
def expected(ranks: RankPool) -> dict[str, Any]:
    return ranks.run(measured, 1, None)[0]


@pytest.mark.parametrize("world", [4, pytest.param(2, marks=pytest.mark.slow)])
def test_metrics_have_the_values_of_one_process(ranks: RankPool, expected: dict[str, Any], world: int) -> None:
    assert {"called_step", "called_epoch", "step only", "updated_epoch", "called/f1_step"} <= set(expected["end"])
    for result in ranks.run(measured, world, {"max_seqlen_per_dp_cp_rank": LIMIT[world]}):
        assert len(result["shown"]) == len(expected["shown"]) == 8
        for i, (ours, right) in enumerate(zip(result["shown"], expected["shown"], strict=True)):
            assert_equal(ours, right, i)
        assert_equal(result["end"], expected["end"])
        assert_equal(result["tested"], expected["tested"])
        assert result["seen"] == expected["seen"]


def validated(strategy: dict[str, Any] | None) -> tuple[dict[str, float], Any]:
    module = Measured()
    run = trainer(strategy=strategy)
    return run.validate(module, loader((9, 5), 2), verbose=False)[0], module.seen  # type: ignore[return-value]


def test_a_set_smaller_than_the_world(ranks: RankPool) -> None:
    """Ranks without any pack have lists without any shape to add."""
    expected, seen = ranks.run(validated, 1, None)[0]
    for ours, values in ranks.run(validated, 4, {"max_seqlen_per_dp_cp_rank": 9}):
        assert_equal(ours, expected)
        assert values == seen


class Wrong(TinyModule):
    """Uses metrics in ways that have no right value when a batch is cut."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.mean, self.extremes, self.running = MeanMetric(), MinMaxMetric(MeanMetric()), Running(SumMetric(), 2)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = next_token_loss(self.model(batch["input_ids"]), batch)
        if self.how == "computed":
            self.mean.update(loss)
            self.log("mean", self.mean.compute())
        elif self.how == "extremes":
            self.extremes(loss)
        else:
            for _ in range(int(batch["attention_mask"].sum())):
                self.running.update(loss)


def refused(how: str) -> str:
    run = trainer(strategy={"max_seqlen_per_dp_cp_rank": 9})
    try:
        run.validate(Wrong(how), loader((9, 5, 3), 3), verbose=False)
    except BatchError as error:
        return str(error)
    raise AssertionError("the run went on")


REFUSED = {
    "computed": "computed over all ranks inside a step.*log the metric object itself",
    "extremes": r"MinMaxMetric is called inside a step.*Call its update\(\)",
    "times": r"Running\(SumMetric\) was updated .* update it as often for every pack",
}


@pytest.mark.parametrize("how", REFUSED)
def test_what_has_no_right_value_is_refused(ranks: RankPool, how: str) -> None:
    assert re.match(f".*{REFUSED[how]}", ranks.run(refused, 1, how)[0])
