"""The monitor logs what the batches' own records say, the same on every rank."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
from lightning.pytorch.loggers import CSVLogger

from lightning_dcp import PerformanceMonitor, RunSummary
from lightning_dcp.callbacks.performance import _computed as computed
from lightning_dcp.callbacks.timed import scheduler_of
from lightning_dcp.errors import ConfigurationError
from lightning_dcp.metrics import ModelFlopUtilization
from lightning_dcp.schedule.plan import Pack
from tests.support.ranks import RankPool
from tests.support.training import TinyModule, loader, trainer

LENGTHS = (60, 3, 30, 7, 1, 12, 5, 29, 2, 61, 16, 9, 13, 40, 4, 4, 8, 30)
SIZE: dict[str, Any] = {"parameters": 5000, "layers": 2, "heads": 2, "head_size": 8, "peak_flops": 1e9}
NAMES = ("tokens_per_second", "busy_share", "padding_share", "step_time_p50", "step_time_p99", "mfu")


class Records(L.Callback):
    """Keeps what each batch's step gave, and what callbacks could see after it."""

    def __init__(self) -> None:
        self.batches: list[dict[str, Any]] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        callback = scheduler_of(trainer, self)
        assert callback.scheduled is not None
        assert callback.result is not None
        seen = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("perf/")}
        lengths = callback.scheduled.plan.lengths
        self.batches.append({"lengths": lengths, "result": callback.result, "seen": seen})


def monitored(limit: int) -> dict[str, Any]:
    utilization = ModelFlopUtilization(**SIZE)
    monitor = PerformanceMonitor(3, warmup_batches=2, utilization=utilization)
    records, summary, logger = Records(), RunSummary(), CSVLogger(".", name="speed")
    run = trainer(
        strategy={"max_seqlen_per_dp_cp_rank": limit},
        callbacks=[monitor, records, summary],
        logger=logger,
        max_epochs=2,
        log_every_n_steps=100,
    )
    run.fit(TinyModule(lr=0.1), loader(LENGTHS, 4), loader(LENGTHS, 9))
    rows: list[dict[str, str]] = []
    if run.is_global_zero:
        with Path(logger.log_dir, "metrics.csv").open() as file:
            rows = [row for row in csv.DictReader(file) if row.get("perf/mfu")]
    end = {name: float(value) for name, value in run.callback_metrics.items() if name.startswith("perf/")}
    return {"batches": records.batches, "rows": rows, "end": end, "measured": summary._measured()}


def test_what_is_logged_is_what_the_batches_say(ranks: RankPool) -> None:
    first, second = ranks.run(monitored, 2, 32)
    assert [b["seen"] for b in first["batches"]] == [b["seen"] for b in second["batches"]]  # the same on all ranks
    assert first["end"] == second["end"]
    rows = first["rows"]
    assert [int(row["step"]) for row in rows] == [4, 7, 10]  # 2 of 10 left out, then 3 + 3 + 2
    windows = [first["batches"][2:5], first["batches"][5:8], first["batches"][8:10]]
    for row, window in zip(rows, windows, strict=True):
        values = {name: float(row[f"perf/{name}"]) for name in NAMES}
        tokens = sum(sum(batch["lengths"]) for batch in window)
        flops = sum(6 * 5000 * n + 12 * 2 * 2 * 8 * n * n for batch in window for n in batch["lengths"])
        busy = sum(sum(batch["result"].busy) for batch in window)
        seconds = tokens / values["tokens_per_second"]  # of the slowest rank
        assert values["busy_share"] == pytest.approx(
            busy / sum(2 * batch["result"].seconds for batch in window), rel=1e-9
        )
        assert values["mfu"] == pytest.approx(flops / (seconds * 2 * 1e9), rel=1e-9)
        assert seconds > sum(batch["result"].seconds for batch in window)  # the optimizer step included
        assert 0 < values["step_time_p50"] <= values["step_time_p99"] < seconds
        assert values["padding_share"] == 0


@pytest.mark.parametrize(
    ("size", "lengths", "tokens"), [(1, (1,), 1), (2, (3,), 4), (4, (3,), 8), (4, (5, 3), 8), (4, (60, 1), 61)]
)
def test_what_is_computed_has_two_tokens_on_each_rank_at_least(
    size: int, lengths: tuple[int, ...], tokens: int
) -> None:
    pack = Pack(0, size, tuple(range(len(lengths))), "zigzag")
    assert computed(pack, lengths) == tokens


def test_callbacks_can_see_the_last_values(ranks: RankPool) -> None:
    result = ranks.run(monitored, 1, 64)[0]
    seen = [batch["seen"] for batch in result["batches"]]
    assert seen[:4] == [{}, {}, {}, {}]
    assert set(seen[4]) == {f"perf/{name}" for name in NAMES}
    assert seen[4] == seen[5] == seen[6] != seen[7]
    tokens_per_second, median, busy = result["measured"]
    assert 0 < busy <= 1
    assert 0 < tokens_per_second < sum(LENGTHS) / median


@pytest.mark.parametrize("options", [{"every_n_batches": 0}, {"warmup_batches": -1}, {"every_n_batches": 1.5}])
def test_numbers_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="not a whole number"):
        PerformanceMonitor(**options)


def without_packs() -> str:
    with pytest.raises(ConfigurationError) as caught:
        trainer(strategy=None, callbacks=[PerformanceMonitor()]).fit(TinyModule(), loader(LENGTHS, 4))
    return str(caught.value)


def test_a_strategy_without_packs_is_refused(ranks: RankPool) -> None:
    assert "a PerformanceMonitor among the trainer's callbacks" in ranks.run(without_packs, 1)[0]
