"""What the monitor logs, tells and records is what the steps' records say, the same on every rank."""

from __future__ import annotations

import csv
import io
import warnings
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import numpy as np
import pytest
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from lightning_dcp import StabilityMonitor
from lightning_dcp.callbacks.stability.kept import KeptSteps
from lightning_dcp.callbacks.timed import scheduler_of
from lightning_dcp.errors import ConfigurationError
from lightning_dcp.segments import Segment
from lightning_dcp.stability.record import Event, Interval, PackTime, RankTime, StepRecord
from lightning_dcp.stability.run_folder import META, Run, RunFolder
from lightning_dcp.stability.run_lines import from_line, to_line
from tests.support.ranks import RankPool
from tests.support.training import COLLATORS, RaggedTokens, TinyModule, loader, trainer

LENGTHS = (9, 3, 12, 7) * 24
"""24 batches of four samples, with ids 0 to 3."""
SLOW = {15: 3.0, 20: 2.0}
EVENTS = {
    10: (
        Event(10, "alarm", "link 0->1", "4.0 times its expected time", 4.0, 8, 0.5),
        Event(10, "action", "link 0->1", "the ring of ranks 0, 1 turned round"),
    ),
    18: (Event(18, "cleared", "link 0->1", "as fast as before"), Event(18, "undone", "link 0->1", "turned back")),
}


def planted(step: int) -> StepRecord:
    """Steps of 1 s, but for two slow ones; rank 1 holds samples 2 and 3 and computes for 80 % of the time."""
    seconds = SLOW.get(step, 1.0)
    ranks = (
        RankTime(0, 0.4 * seconds, 0.5 * seconds, 0.1 * seconds, 0.4, 1 << 20),
        RankTime(1, 0.8 * seconds, 0.1 * seconds, 0.1 * seconds, 0.8, 1 << 20),
    )
    spans = (Interval("compute", 0.0, seconds),)
    packs = (
        PackTime(0, 0, 0, 1, 0.0, 0.5 * seconds, 12, 0, (0, 1), spans, {"user": 12}, (9, 3)),
        PackTime(1, 1, 1, 1, 0.0, 0.9 * seconds, 19, 0, (2, 3), spans, {"user": 4, "tool": 15}, (12, 7)),
    )
    return StepRecord(step, seconds, 31, 0.9, ranks, (), packs, EVENTS.get(step, ()))


class Plant(L.Callback):
    """Puts a record, or none, into what each step gave, and keeps what the step really gave."""

    def __init__(self, made_up: bool) -> None:
        self.made_up = made_up
        self.results: list[Any] = []
        self.seen: list[dict[str, float]] = []

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self.seen.append({name: float(v) for name, v in trainer.callback_metrics.items() if "stability/" in name})

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        result = scheduler_of(trainer, self).result
        step = trainer.fit_loop.epoch_loop.total_batch_idx
        object.__setattr__(result, "record", planted(step) if self.made_up else None)
        self.results.append(result)


def monitored(made_up: bool = True, **options: Any) -> dict[str, Any]:
    plant, logger = Plant(made_up), CSVLogger(".", name="steady")
    monitor = StabilityMonitor(10, **{"window": 8, "warmup_batches": 2, "timeline_every": 7, "top_k": 2} | options)
    run = trainer(
        strategy={"max_seqlen_per_dp_cp_rank": 64}, callbacks=[plant, monitor], logger=logger, log_every_n_steps=100
    )
    printed = io.StringIO()
    with redirect_stdout(printed), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        run.fit(TinyModule(lr=0.1), loader(LENGTHS, 4))
    rows: list[dict[str, str]] = []
    folder = Path(logger.log_dir)
    if run.is_global_zero:
        with (folder / "metrics.csv").open() as file:
            rows = list(csv.DictReader(file))
    recorded = RunFolder.read(folder) if (folder / "stability" / META).exists() else None
    return {
        "rows": rows,
        "seen": plant.seen,
        "results": plant.results,
        "end": {name: float(v) for name, v in run.callback_metrics.items() if name.startswith("stability/")},
        "run": recorded,
        "printed": printed.getvalue(),
        "warned": [str(warning.message) for warning in warned],
    }


def row_at(rows: list[dict[str, str]], name: str) -> dict[int, float]:
    return {int(row["step"]): float(row[name]) for row in rows if row.get(name)}


def test_what_is_logged_recorded_and_printed_is_what_the_records_say(ranks: RankPool) -> None:
    first, second = ranks.run(monitored, 2)
    assert first["seen"] == second["seen"]  # the same on all ranks, whenever it is looked at
    assert first["end"] == second["end"]
    check_logged(first["rows"])
    check_recorded(first["run"])
    check_printed(first)
    assert second["printed"] == ""


def check_logged(rows: list[dict[str, str]]) -> None:
    """Rows after 10 and 20 counted batches and at the end; batches 0 and 1 are left out, windows are of 8."""
    windows = [[SLOW.get(step, 1.0) for step in range(end - 8, end)] for end in (12, 22, 24)]
    steps = (11, 21, 24)  # Lightning's number of the last batch; at the end, of the next
    p50, p99 = np.array([np.quantile(window, (0.5, 0.99)) for window in windows]).T
    for name, expected in {
        "step_time_p50": p50,
        "step_time_p99": p99,
        "step_time_p99_over_p50": p99 / p50,
        "tokens_per_second": [31 * 8 / sum(window) for window in windows],
        "steadiness": [8 / sum(window) for window in windows],
        "busy_share": [0.6] * 3,
        "busy_share_worst": [0.4] * 3,
        "wait_share": [0.3] * 3,
        "wait_share_worst": [0.5] * 3,
        "transfer_share": [0.1] * 3,
        "alarms": [1, 1, 1],
        "alarms_active": [1, 0, 0],
        "actions": [1, 1, 1],
    }.items():
        found = row_at(rows, f"stability/{name}")
        assert found == pytest.approx(dict(zip(steps, expected, strict=True))), name
    assert row_at(rows, "stability/slowdown/link_0_to_1") == {10: 4.0, 18: 1.0}
    assert all(0.01 < value < 100 for value in row_at(rows, "stability/memory_max_gib").values())


def check_recorded(run: Run) -> None:
    """Every step, and timelines of the first after the warm-up, each seventh from there, and the slow."""
    assert [record.step for record in run.steps] == list(range(24))
    timed = {record.step for record in run.timed()}
    assert timed == {2, 9, 15, 16, 23} | ({20} & timed)  # of step 20, 2 s, it depends on where the 99th percentile lies
    for record in run.steps:
        full = from_line(to_line(planted(record.step)))
        bare = replace(full, packs=tuple(replace(pack, intervals=()) for pack in full.packs))
        assert record == (full if record.step in timed else bare)
    assert run.meta["plane_size"] == 2
    assert run.meta["cp_sizes"] == [1, 2]
    assert run.meta["max_seqlen_per_dp_cp_rank"] == 64
    assert run.meta["layout"] == "zigzag"
    assert run.meta["dynamic_context_parallel"] is True
    assert run.meta["warmup_batches"] == 2
    assert run.meta["ring"] == [0, 1]
    assert run.meta["ring_order"] == "rank"
    assert run.meta["budget"] is None
    assert run.meta["hop_timing"] is True
    assert run.meta["cost_model"]["linear"] > 0
    assert {"lightning", "torch", "lightning-dcp", "python"} <= run.meta["versions"].keys()


def check_printed(found: dict[str, Any]) -> None:
    # slow by 2 s and 1 s; samples 2 and 3 have 12 and 7 of rank 1's 19 tokens, tools 15 of them
    for words in (
        "hot sample 2",
        f"{3 * 12 / 19:.3f} s over the median in 2 slow steps, last 20",
        "hot sample 3",
        f"{3 * 7 / 19:.3f} s",
        "hot kind tool",
        f"{3 * 15 / 19:.3f} s",
        "step time, p99 over p50",
        "recorded in",
    ):
        assert words in found["printed"], words
    assert "hot sample 0" not in found["printed"]


def test_without_hop_times_all_that_is_not_busy_is_waiting(ranks: RankPool) -> None:
    first, second = ranks.run(monitored, 2, made_up=False, window=100)
    assert first["end"] == second["end"]
    results = first["results"]
    seconds = [round(result.seconds, 9) for result in results]
    assert [record.seconds for record in first["run"].steps] == seconds
    assert first["end"]["stability/step_time_p50"] == pytest.approx(np.median([r.seconds for r in results[2:]]))
    assert first["end"]["stability/transfer_share"] == 0.0
    busy, wait = (first["end"][f"stability/{kind}_share"] for kind in ("busy", "wait"))
    assert busy + wait == pytest.approx(1.0)
    last = results[22:]  # the first 20 counted were logged, these after them
    assert busy == pytest.approx(np.mean([r.busy for r in last], axis=0).mean() / np.mean([r.seconds for r in last]))
    assert sum(len(record.ranks) for record in first["run"].steps) == 48
    assert {record.tokens for record in first["run"].steps} == {31}


def test_nothing_is_written_that_is_not_asked_for(ranks: RankPool) -> None:
    found = ranks.run(monitored, 2, record=False)[0]
    assert found["run"] is None
    assert "recorded in" not in found["printed"]


def on_a_full_disk() -> dict[str, Any]:
    add, RunFolder.add = RunFolder.add, full  # type: ignore[method-assign]
    try:
        return monitored()
    finally:
        RunFolder.add = add  # type: ignore[method-assign]


def full(self: RunFolder, record: StepRecord) -> None:
    raise OSError(28, "No space left on device")


def test_a_full_disk_ends_the_record_and_not_the_run(ranks: RankPool) -> None:
    found = ranks.run(on_a_full_disk, 2)[0]
    assert len(found["results"]) == 24
    lines = [line for line in found["warned"] if "record of this run ends at step 0" in line]
    assert len(lines) == 1
    assert "No space left" in lines[0]


def resumed(folder: Path) -> tuple[Run, dict[str, float]]:
    half = str(folder / "half.ckpt")
    for epochs, checkpoint in ((2, None), (3, half)):
        logger = CSVLogger(folder, version=0)
        run = trainer(
            strategy={"max_seqlen_per_dp_cp_rank": 64},
            callbacks=[StabilityMonitor(warmup_batches=0)],
            logger=logger,
            max_epochs=epochs,
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run.fit(TinyModule(lr=0.1), loader((90, 3, 12, 7) * 3, 4), ckpt_path=checkpoint)
        run.save_checkpoint(half)
    end = {name: float(value) for name, value in run.callback_metrics.items() if name.startswith("stability/")}
    return (RunFolder.read(logger.log_dir) if run.is_global_zero else None), end  # type: ignore[return-value]


def test_what_is_measured_is_recorded_and_a_resumed_run_goes_on(ranks: RankPool, tmp_path: Path) -> None:
    """A sample of 90 tokens is on both ranks, at most 64 of them on one."""
    (run, end), (_, other) = ranks.run(resumed, 2, tmp_path)
    assert end == other
    assert [record.step for record in run.steps] == list(range(9))
    assert len(run.meta["starts"]) == 2
    for record in run.steps:
        assert record.tokens == 112
        assert {(link.source, link.target) for link in record.links} <= {(0, 1), (1, 0)}
        assert sum(pack.tokens for pack in record.packs) == 112
        assert sorted({sample for pack in record.packs for sample in pack.sample_ids}) == [0, 1, 2, 3]
        assert all(0 < time.busy_s <= record.seconds and time.memory_bytes > 1 << 20 for time in record.ranks)
        assert all(pack.start_s < pack.end_s <= record.seconds * 1.001 for pack in record.packs)
    assert {0, 6} <= {record.step for record in run.timed()}  # the first of each start
    last = np.quantile([record.seconds for record in run.steps[6:]], 0.5)
    assert end["stability/step_time_p50"] == pytest.approx(last, rel=1e-6)


class Dense(RaggedTokens):
    """Samples of 100 tokens whose last 40 are dense."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return super().__getitem__(index) | {"segments": (Segment(60, 100, "tool", 2.0),)}


class Expected(L.Callback):
    """Keeps what was expected of the ranks."""

    def __init__(self) -> None:
        self.parts: list[tuple[tuple[float, ...], ...]] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.parts.append(tuple(rank.expected_parts for rank in scheduler_of(trainer, self).result.record.ranks))


def by_layout(layout: str) -> list[tuple[tuple[float, ...], ...]]:
    expected = Expected()
    strategy = {"max_seqlen_per_dp_cp_rank": 64, "layout": layout}
    run = trainer(strategy=strategy, callbacks=[expected], logger=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run.fit(TinyModule(lr=0.1), DataLoader(Dense((100,) * 3), batch_size=1, collate_fn=COLLATORS["packed"]))
    return expected.parts


def test_records_expect_of_each_rank_what_the_layout_gives_it(ranks: RankPool) -> None:
    """Samples of 100 tokens on two ranks, the last 40 of them dense: with three times the attention on the second."""
    for layout in ("contiguous", "budgeted"):
        first, second = ranks.run(by_layout, 2, layout)
        assert first == second and len(first) == 3
        for (_, tokens, attention, extra), (_, others, more, beside) in first:
            assert extra + beside == pytest.approx(0.4 * (tokens + others))
            if layout == "contiguous":
                assert (more, others, extra) == pytest.approx((3 * attention, tokens, 0.0))
            else:
                assert min(extra, beside) == 0.0 and tokens != others


def test_which_steps_are_kept() -> None:
    kept = KeptSteps(every=100)
    seconds = [1.0 + 0.001 * (i % 50) for i in range(1000)]
    for i, slow in ((333, 2.0), (777, 3.0)):
        seconds[i] = slow
    found = [i for i, value in enumerate(seconds) if kept.keeps(value)]
    assert {0, 100, 200, 300, 333, 400, 500, 600, 700, 777, 800, 900} <= set(found)
    assert len([i for i in found if i >= 50]) < 40  # beside those, only what is among the slowest hundredth
    first_only = KeptSteps(every=0)
    assert [i for i in range(50) if first_only.keeps(1.0)] == [0]


def test_arguments_that_make_no_sense_are_refused_at_once() -> None:
    with pytest.raises(ConfigurationError) as caught:
        StabilityMonitor(
            0,
            window=0,
            warmup_batches=-1,
            quantiles=(0.5, 99),
            top_k=0,
            timeline_every=1.5,  # type: ignore[arg-type]
        )
    names = (
        "every_n_batches=0",
        "window=0",
        "warmup_batches=-1",
        "quantiles=[0.5, 99]",
        "top_k=0",
        "timeline_every=1.5",
    )
    assert len(caught.value.problems) == len(names)
    for name in names:
        assert name in str(caught.value)


def without_packs() -> str:
    with pytest.raises(ConfigurationError) as caught:
        trainer(strategy=None, callbacks=[StabilityMonitor()]).fit(TinyModule(), loader(LENGTHS, 4))
    return str(caught.value)


def test_a_strategy_without_packs_is_refused(ranks: RankPool) -> None:
    assert "a StabilityMonitor among the trainer's callbacks" in ranks.run(without_packs, 1)[0]
