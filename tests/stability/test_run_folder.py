"""A run's record on disk: read back as written, while it grows, after kills and resumptions, and bounded."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_dcp.errors import DataError
from lightning_dcp.stability.record import Event, Interval, LinkTime, PackTime, RankTime, StepRecord
from lightning_dcp.stability.run_folder import META, STEPS, RunFolder
from lightning_dcp.stability.run_lines import without_intervals


def step(number: int, seconds: float = 0.5, **fields: Any) -> StepRecord:
    """A step of two ranks with one pack over both."""
    intervals = (Interval("compute", 0.0, 0.25), Interval("wait", 0.25, 0.375), Interval("transfer", 0.375, 0.5))
    packs = tuple(
        PackTime(0, rank, 0, 2, 0.0, 0.5, 100, 40, (7, "a"), intervals, {"user": 60, "tool": 40}) for rank in (0, 1)
    )
    ranks = tuple(RankTime(rank, 0.25, 0.125, 0.125, 0.2, 1 << 30) for rank in (0, 1))
    links = (LinkTime(0, 1, 3, 3000, 0.03, 0.01, 0.008), LinkTime(1, 0, 3, 3000, 0.03, 0.01, 0.008))
    return replace(StepRecord(number, seconds, 200, 0.4, ranks, links, packs), **fields)


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    event = Event(1, "alarm", "link 0->1", 'slow "packs":[1],"events":', 3.5, 0, 0.25)
    steps = (step(0), step(1, events=(event,)), step(2, predicted_s=None, links=(), packs=()))
    folder = RunFolder(tmp_path / "stability", {"layout": "zigzag"})
    for record in steps:
        folder.add(record)
    folder.flush()
    run = RunFolder.read(tmp_path)  # the run's own folder
    assert run == RunFolder.read(tmp_path / "stability")
    assert run.steps == steps
    assert run.timed() == steps[:2]
    assert run.meta["layout"] == "zigzag"
    assert len(run.meta["starts"]) == 1


def test_times_keep_nanoseconds_and_ids_of_any_kind_become_json(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, {"budget": Path("x")}, flush_every=1)
    pack = replace(step(0).packs[0], sample_ids=(torch.tensor(5), Path("some")))
    folder.add(replace(step(0, 1.23456789012), packs=(pack,)))
    run = RunFolder.read(tmp_path)
    assert run.steps[0].seconds == 1.23456789
    assert run.steps[0].packs[0].sample_ids == (5, "some")
    assert run.meta["budget"] == "x"


def test_text_that_no_file_can_hold_is_read_with_escapes(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, {"name": "\ud800", "pair": "\U0001f600"}, flush_every=1)
    pack = replace(step(0).packs[0], sample_ids=("\udc80b", "\U0001f600"), tokens_by_kind={"\ud800": 100})
    folder.add(replace(step(0), packs=(pack,)))
    run = RunFolder.read(tmp_path)
    assert (run.meta["name"], run.meta["pair"]) == ("\\ud800", "\U0001f600")
    assert run.steps[0].packs[0].sample_ids == ("\\udc80b", "\U0001f600")
    assert run.steps[0].packs[0].tokens_by_kind == {"\\ud800": 100}


def test_steps_are_on_disk_every_few_and_alarms_at_once(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, {}, flush_every=3)
    folder.add(step(0))
    assert RunFolder.read(tmp_path).steps == ()
    folder.add(step(1, events=(Event(1, "alarm", "rank 1", "slow"),)))
    assert len(RunFolder.read(tmp_path).steps) == 2
    for number in (2, 3, 4):
        folder.add(step(number))
    assert len(RunFolder.read(tmp_path).steps) == 5


def test_a_last_line_that_was_cut_off_is_ignored_and_mended(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, {}, flush_every=1)
    folder.add(step(0))
    folder.add(step(1))
    content = (tmp_path / STEPS).read_bytes()
    (tmp_path / STEPS).write_bytes(content[:-20])
    assert [record.step for record in RunFolder.read(tmp_path).steps] == [0]
    again = RunFolder(tmp_path, {}, flush_every=1)
    again.add(step(1))
    assert [record.step for record in RunFolder.read(tmp_path).steps] == [0, 1]


def test_a_resumed_run_replaces_what_it_runs_again(tmp_path: Path) -> None:
    first = RunFolder(tmp_path, {"layout": "zigzag"}, flush_every=1)
    for number in range(6):
        first.add(step(number, 1.0))
    resumed = RunFolder(tmp_path, {"layout": "budgeted"}, flush_every=1)
    for number in (3, 4):
        resumed.add(step(number, 2.0))
    run = RunFolder.read(tmp_path)
    assert [(record.step, record.seconds) for record in run.steps] == [(0, 1.0), (1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0)]
    assert run.meta["layout"] == "budgeted"
    assert len(run.meta["starts"]) == 2


@pytest.mark.parametrize("most_bytes", [280_000, 100_000, 30_000])
def test_a_long_run_is_thinned_and_keeps_every_step(tmp_path: Path, most_bytes: int) -> None:
    """300 steps of 0.9 to 1.1 kB, of which 0.1 kB must stay; the slowest are the last to lose their packs."""
    folder = RunFolder(tmp_path, {}, flush_every=5, most_bytes=most_bytes)
    slow, alarm = {50: 9.0, 200: 8.0}, Event(120, "alarm", "link 0->1", 'slow: "packs":[], ],"events":[')
    for number in range(300):
        record = step(number, slow.get(number, 0.5), events=(alarm,) if number == 120 else ())
        folder.add(record if number % 3 == 0 or number in slow else without_intervals(record))
    folder.flush()
    run = RunFolder.read(tmp_path)
    assert (tmp_path / STEPS).stat().st_size <= max(most_bytes, 2 * 300 * 130)
    assert [record.step for record in run.steps] == list(range(300))
    assert [record.seconds for record in run.steps] == [slow.get(number, 0.5) for number in range(300)]
    assert run.steps[120].events == (alarm,)
    timed = {record.step for record in run.timed()}
    assert (slow.keys() <= timed) == (most_bytes >= 100_000)
    assert 0 < len(timed) < 102
    bare = sum(not record.ranks for record in run.steps)
    assert 0 < bare < (150 if most_bytes >= 280_000 else 300)


def nothing(folder: Path) -> None:
    pass


def other_format(folder: Path) -> None:
    (folder / META).write_text(json.dumps({"format": 99}))


def no_json(folder: Path) -> None:
    (folder / META).write_text("{")


def broken_line(folder: Path) -> None:
    RunFolder(folder, {}).flush()
    (folder / STEPS).write_text('{"step": 1}\n{"step": 2}\n')


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (nothing, "holds no record of a run"),
        (other_format, "format 99, but this release reads format 1"),
        (no_json, "cannot be read as the facts of a run"),
        (broken_line, r"steps\.jsonl:1: no record of a step \(KeyError"),
    ],
)
def test_what_is_no_record_is_refused(tmp_path: Path, make: Any, message: str) -> None:
    make(tmp_path)
    with pytest.raises(DataError, match=message):
        RunFolder.read(tmp_path)


def test_a_folder_of_something_else_is_not_written_over(tmp_path: Path) -> None:
    other_format(tmp_path)
    with pytest.raises(DataError, match="move the folder away"):
        RunFolder(tmp_path, {})
    assert json.loads((tmp_path / META).read_text()) == {"format": 99}
