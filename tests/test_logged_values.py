"""What the user sees on the screen, in loggers and in callbacks is what one process of plain Lightning shows."""

from __future__ import annotations

import csv
import re
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor

from lightning_dcp import next_token_loss
from lightning_dcp.batch.labels import shifted_labels
from lightning_dcp.errors import BatchError
from tests.support.plans import PaperModule, train_by_plan
from tests.support.ranks import RankPool
from tests.support.training import TinyModule, loader, trainer

LENGTHS = (60, 3, 30, 7, 1, 12, 5, 29, 2, 61, 16, 9, 13, 40, 4, 4, 8, 30)
VALIDATION = (9, 31, 2, 5, 22)
SMALL = (11,)
LIMIT = {1: 64, 2: 32, 4: 16}


class Talkative(TinyModule):
    """Logs in every way that Lightning has."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = next_token_loss(self.model(batch["input_ids"]), batch)
        samples = len(batch["input_ids"])
        lengths = batch["attention_mask"].sum(1).double()
        targets = int((shifted_labels(batch) != -100).sum())
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True, sync_dist=True)
        self.log("plain", loss)
        self.log("by tokens", loss, on_step=True, on_epoch=True, batch_size=targets)
        self.log("mean length", lengths.mean(), on_step=True, on_epoch=True, batch_size=samples, sync_dist=False)
        self.log("longest", lengths.max(), on_step=True, on_epoch=True, reduce_fx="max")
        self.log("shortest", lengths.min(), on_step=False, on_epoch=True, reduce_fx=torch.min)
        self.log("tokens", lengths.sum(), on_step=True, on_epoch=True, reduce_fx="sum", prog_bar=True)
        self.log("samples", samples, on_step=True, on_epoch=True, reduce_fx=sum)
        self.log("constant", 3, logger=False)
        self.log("average", loss, on_step=False, on_epoch=True, reduce_fx="avg", rank_zero_only=True)
        self.log_dict({"a": loss * 2, "b": loss.detach() + 1}, on_step=True, on_epoch=True)
        for _ in range(2):  # the last value is the step's, both count in the epoch
            self.log("twice", lengths.sum() * (_ + 1), on_step=True, on_epoch=True, reduce_fx="sum")
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        loss = next_token_loss(self.model(batch["input_ids"]), batch)
        self.log("val", loss, sync_dist=True, prog_bar=True)
        self.log("val step", loss, on_step=True)
        self.log(f"own {dataloader_idx}", loss, add_dataloader_idx=False)

    test_step = validation_step

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.log("hook start", float(batch_idx), on_step=True, on_epoch=True)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norm = torch.stack([p.grad.norm() for p in self.parameters() if p.grad is not None]).norm()
        self.log("gradient norm", norm, on_step=True, on_epoch=True, batch_size=1)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("hook end", outputs["loss"] * 3, on_step=True, on_epoch=True, sync_dist=True)

    def on_train_epoch_end(self) -> None:
        self.log("epoch end", self.trainer.callback_metrics["loss_step"] * 2)

    def on_validation_epoch_end(self) -> None:
        self.log("val end", float(self.current_epoch) + 0.5, sync_dist=True)


class Watching(L.Callback):
    """Keeps what the trainer shows after each batch, and what a callback logs."""

    def __init__(self) -> None:
        self.shown: list[dict[str, dict[str, float]]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        self.log("from a callback", outputs["loss"], on_step=True, on_epoch=True, prog_bar=True)
        self.shown.append(shown(trainer))

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self.shown.append(shown(trainer))


def shown(run: L.Trainer) -> dict[str, dict[str, float]]:
    names = ("callback_metrics", "logged_metrics", "progress_bar_metrics")
    return {name: {key: float(value) for key, value in getattr(run, name).items()} for name in names}


def rows(folder: str | None) -> list[dict[str, str]]:
    if folder is None:
        return []
    with Path(folder, "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def watched(strategy: dict[str, Any] | None, kind: type[TinyModule] = Talkative, **options: Any) -> dict[str, Any]:
    """Train two epochs with two validation sets and test; all that was shown and written."""
    watching, module = Watching(), kind(lr=0.05)
    logger = CSVLogger(".", name="logs")
    run = trainer(
        strategy=strategy,
        logger=logger,
        max_epochs=2,
        callbacks=[watching, LearningRateMonitor("step")],
        num_sanity_val_steps=1,
        **({"log_every_n_steps": 1} | options),
    )
    run.fit(module, loader(LENGTHS, 5), [loader(VALIDATION, 3), loader(SMALL, 3)])
    tested = run.test(module, [loader(VALIDATION, 2), loader(SMALL, 2)], verbose=False)
    written = rows(logger.log_dir) if run.is_global_zero else []
    return {"shown": watching.shown, "end": shown(run), "tested": tested, "rows": written}


def assert_equal(ours: Any, expected: Any, tolerance: float = 1e-9, at: str = "") -> None:
    """The same structure and keys, numbers within a relative tolerance."""
    assert type(ours) is type(expected), at
    if isinstance(expected, dict):
        assert list(ours) == list(expected), at
        for key in expected:
            assert_equal(ours[key], expected[key], tolerance, f"{at}/{key}")
    elif isinstance(expected, list):
        assert len(ours) == len(expected), at
        for i, (own, right) in enumerate(zip(ours, expected, strict=True)):
            assert_equal(own, right, tolerance, f"{at}[{i}]")
    elif isinstance(expected, str):  # a cell of a table
        assert bool(ours) == bool(expected), at
        assert float(ours or 0) == pytest.approx(float(expected or 0), rel=tolerance), at
    else:
        assert ours == pytest.approx(expected, rel=tolerance, abs=tolerance, nan_ok=True), at


ACCUMULATED = {"accumulate_grad_batches": 2, "log_every_n_steps": 2}


@pytest.mark.parametrize(
    ("world", "options"),
    [
        (2, {}),
        pytest.param(4, {}, marks=pytest.mark.slow),
        pytest.param(2, ACCUMULATED, marks=pytest.mark.slow),
        pytest.param(4, ACCUMULATED, marks=pytest.mark.slow),
    ],
)
def test_everything_shown_and_written_is_as_in_one_process(
    ranks: RankPool, world: int, options: dict[str, Any]
) -> None:
    options = dict(options)
    expected = ranks.run(watched, 1, None, **options)[0]
    results = ranks.run(watched, world, {"max_seqlen_per_dp_cp_rank": LIMIT[world]}, **options)
    assert len(expected["rows"]) > 4
    for rank, result in enumerate(results):
        for name in ("shown", "end", "tested"):
            assert_equal(result[name], expected[name], at=name)
        if rank == 0:
            assert_equal(result["rows"], expected["rows"], at="rows")


class Monitored(TinyModule):
    """Learns too fast, so that the validation loss rises again."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)}


def monitored(strategy: dict[str, Any] | None, folder: str) -> dict[str, Any]:
    stopping = EarlyStopping("val_loss", patience=1)
    best = ModelCheckpoint(folder, "{epoch}-{step}-{val_loss:.6f}", monitor="val_loss", save_top_k=2)
    rates = LearningRateMonitor("epoch")
    module = Monitored(lr=0.4)
    run = trainer(
        strategy=strategy,
        max_epochs=8,
        enable_checkpointing=True,
        callbacks=[stopping, best, rates],
        logger=CSVLogger(".", name="monitored"),
    )
    run.fit(module, loader(LENGTHS, 5), loader(VALIDATION, 3))
    return {
        "stopped": stopping.stopped_epoch,
        "wait": stopping.wait_count,
        "epochs": run.current_epoch,
        "steps": run.global_step,
        "score": float(stopping.best_score),
        "kept": sorted((Path(path).name, float(value)) for path, value in best.best_k_models.items()),
        "best": Path(best.best_model_path).name,
        "rates": rates.lrs["lr-SGD"],
    }


def test_callbacks_that_watch_a_value_decide_as_in_one_process(ranks: RankPool, tmp_path: Path) -> None:
    expected = ranks.run(monitored, 1, None, str(tmp_path / "one"))[0]
    assert 0 < expected["stopped"] < 7
    for result in ranks.run(monitored, 2, {"max_seqlen_per_dp_cp_rank": 32}, str(tmp_path / "two")):
        names, values = zip(*result.pop("kept"), strict=True)
        right_names, right_values = zip(*expected["kept"], strict=True)
        assert names == right_names
        assert values == pytest.approx(right_values, rel=1e-9)
        assert {**result, "kept": 0, "score": 0} == {**expected, "kept": 0, "score": 0}
        assert result["score"] == pytest.approx(expected["score"], rel=1e-9)


# --------------------------------------------------------------- logged unlike on different packs

BATCH = {
    "input_ids": torch.ones(2, 4, dtype=torch.long),
    "values": torch.tensor([[1.0, 2.0, 3.0, 0.0], [5.0, 0.0, 0.0, 0.0]]),
    "labels": torch.tensor([[0, 0, 0, -100], [0, 0, -100, -100]]),
    "attention_mask": torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]]),
}
PACKS = [(0, 1, [0]), (1, 1, [1])]


class Unlike(PaperModule):
    """The pack with the first sample, on rank 0, logs something else than the other."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.how == "keys":
            self.log("a" if float(batch["values"][0, 0]) == 1.0 else "b", loss)
        elif self.global_rank == 0:
            self.log("a", loss, rank_zero_only=True)
        return loss


def failure(how: str) -> tuple[float, str, list[str]]:
    module, start = Unlike(how), time.perf_counter()
    try:
        train_by_plan(module, [BATCH], PACKS, 2)
    except BatchError as error:
        return time.perf_counter() - start, str(error), list(module.trainer.callback_metrics)
    raise AssertionError("the run went on")


@pytest.mark.parametrize(("how", "keys"), [("keys", r"\['a', 'b'\]"), ("rank zero", r"\['a'\].*rank_zero_only")])
def test_packs_that_log_unlike_keys_are_refused_soon_and_nothing_is_mixed(ranks: RankPool, how: str, keys: str) -> None:
    for seconds, message, names in ranks.run(failure, 2, how):
        assert seconds < 10
        assert re.match(f"self.log was called with {keys}", message), message
        assert names == []
