"""When a rank fails, the others end soon and say which one it was and why."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
from torch import Tensor

from lightning_dcp import DCPError, PerformanceMonitor, StabilityMonitor
from lightning_dcp.stability.run_folder import FOLDER, META
from tests.support.ranks import RankPool
from tests.support.training import TinyModule, loader, trainer

LENGTHS = (30, 3, 30, 7, 1, 12, 5, 29, 2, 31, 16, 9)


def raise_error() -> None:
    raise ValueError("the tokens have gone off")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Failing(TinyModule):
    """Fails on one rank in its second batch."""

    def __init__(self, rank: int, fail: Callable[[], None]) -> None:
        super().__init__(lr=0.1)
        self.rank, self.fail = rank, fail

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 1 and self.global_rank == self.rank:
            self.fail()
        return super().training_step(batch, batch_idx)


def train(rank: int, fail: Callable[[], None]) -> None:
    trainer(strategy={"max_seqlen_per_dp_cp_rank": 8}, precision="32-true").fit(Failing(rank, fail), loader(LENGTHS, 4))


@pytest.mark.parametrize("rank", [0, 2])
def test_an_exception_is_shown_by_all_ranks(ranks: RankPool, rank: int) -> None:
    start = time.monotonic()
    outcomes = ranks.run_all(train, 4, rank, raise_error, timeout=60)
    assert time.monotonic() - start < 30
    assert "ValueError: the tokens have gone off" in outcomes[rank][1]
    for other, (ok, text) in enumerate(outcomes):
        assert not ok
        if other != rank:
            assert f"PeerFailureError: rank {rank} failed: ValueError: the tokens have gone off" in text


@pytest.mark.parametrize("rank", [0, 3])
def test_a_killed_rank_is_named_by_the_others(ranks: RankPool, rank: int) -> None:
    start = time.monotonic()
    outcomes = ranks.run_all(train, 4, rank, die, timeout=60)
    assert time.monotonic() - start < 60
    for other, (ok, text) in enumerate(outcomes):
        assert not ok
        if other != rank:
            assert f"PeerFailureError: rank {rank} failed" in text or "process ended: 1" in text
    assert any("PeerFailureError" in text for _, text in outcomes)


def monitored(kind: type[StabilityMonitor] | type[PerformanceMonitor], hook: str) -> None:
    """Rank 1 fails inside a hook of its monitor, while the others wait for it to gather with."""

    class FailsThere(kind):  # type: ignore[valid-type, misc]
        def _publish(self, trainer: L.Trainer) -> None:
            self.fail_in("count", trainer)
            super()._publish(trainer)

        def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            self.fail_in("on_train_end", trainer)
            super().on_train_end(trainer, pl_module)

        def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            self.fail_in("on_fit_start", trainer)
            super().on_fit_start(trainer, pl_module)

        def fail_in(self, where: str, trainer: L.Trainer) -> None:
            if where == hook and trainer.global_rank == 1:
                raise_error()

    every = 1 if hook == "count" else 1000
    monitor = FailsThere(every, warmup_batches=0)
    run = trainer(strategy={"max_seqlen_per_dp_cp_rank": 16}, callbacks=[monitor])
    run.fit(TinyModule(lr=0.1), loader(LENGTHS, 4))


@pytest.mark.parametrize(
    ("kind", "hook"),
    [
        (StabilityMonitor, "on_fit_start"),
        (StabilityMonitor, "count"),
        (StabilityMonitor, "on_train_end"),
        (PerformanceMonitor, "count"),
        (PerformanceMonitor, "on_train_end"),
    ],
)
def test_a_failure_in_a_monitor_is_shown_by_all_ranks(
    ranks: RankPool, kind: type[StabilityMonitor] | type[PerformanceMonitor], hook: str
) -> None:
    outcomes = ranks.run_all(monitored, 3, kind, hook, timeout=60)
    for rank, (ok, text) in enumerate(outcomes):
        assert not ok
        expected = "" if rank == 1 else "PeerFailureError: rank 1 failed: "
        assert f"{expected}ValueError: the tokens have gone off" in text


def record_over_another() -> None:
    """Rank 0 finds a record of another format in the run's folder, when all else is ready."""
    run = trainer(strategy={"max_seqlen_per_dp_cp_rank": 16}, callbacks=[StabilityMonitor()], default_root_dir="old")
    Path("old", FOLDER).mkdir(parents=True, exist_ok=True)
    Path("old", FOLDER, META).write_text("{}")
    run.fit(TinyModule(lr=0.1), loader(LENGTHS, 4))


def test_a_record_that_cannot_be_begun_is_told_by_all_ranks(ranks: RankPool) -> None:
    for rank, (ok, text) in enumerate(ranks.run_all(record_over_another, 3, timeout=60)):
        assert not ok
        assert "DataError" in text and "format None" in text
        assert rank == 0 or "PeerFailureError: rank 0 failed: DataError" in text


def fail_then_train() -> float:
    """All ranks are refused, mend it, and train with a new trainer in the same processes."""
    with pytest.raises(DCPError):
        trainer(strategy={"max_seqlen_per_dp_cp_rank": 1}).fit(TinyModule(lr=0.1), loader(LENGTHS, 4))
    run = trainer(strategy={"max_seqlen_per_dp_cp_rank": 8}, callbacks=[SlowEnd()])
    run.fit(TinyModule(lr=0.1), loader(LENGTHS, 4))
    return float(run.callback_metrics["train_loss_step"])


class SlowEnd(L.Callback):
    """One rank has much to do after training, longer than it takes to count as dead."""

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        watchdog = trainer.strategy._watchdog
        watchdog.stale_after = watchdog.grace = 2.0
        if trainer.global_rank == 1:
            time.sleep(6)


def test_a_refused_run_and_a_slow_end_harm_no_later_run(ranks: RankPool) -> None:
    losses = ranks.run(fail_then_train, 4)
    assert len(set(losses)) == 1
