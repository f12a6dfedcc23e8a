"""The monitor's table at the end, and whom it blames for slow steps."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from lightning_dcp.callbacks.stability.measured import Measured
from lightning_dcp.callbacks.stability.summary import summary_table
from lightning_dcp.stability.record import PackTime, RankTime, StepRecord


def fed(*, steps: int = 12, last: float = 1.0, late_s: float = 0.0, usual_s: float = 0.0) -> Measured:
    """Steps of 1 s, the last one longer, in which rank 1 began its packs so late."""
    measured = Measured(2, window=50, quantiles=(0.99,), top_k=3)
    for number in range(steps):
        is_last = number == steps - 1
        seconds, start = (last, late_s) if is_last else (1.0, usual_s)
        packs = (
            PackTime(0, 0, 0, 2, 0.0, seconds, 10, sample_ids=("victim",)),
            PackTime(0, 1, 0, 2, start, seconds, 10, sample_ids=("victim",)),
        )
        ranks = (RankTime(0, 0.6, seconds - 0.7, 0.1, 0.6), RankTime(1, 0.5, 0.1, 0.1, 0.5))
        measured.update(StepRecord(number, seconds, 20, None, ranks, (), packs), packs)
    return measured


@pytest.mark.parametrize(
    ("late_s", "usual_s", "blamed"),
    [(1.9, 0.0, False), (1.0, 0.0, False), (0.9, 0.0, True), (1.9, 1.5, True)],
)
def test_no_sample_is_blamed_for_a_late_start(late_s: float, usual_s: float, blamed: bool) -> None:
    """Two seconds over the median; half of them or more because a rank began later than it usually does."""
    measured = fed(last=3.0, late_s=late_s, usual_s=usual_s)
    assert measured.slow == 1
    assert [spot.name for spot in measured.samples.compute()] == (["victim"] if blamed else [])


def printed(measured: Measured, folder: Path | None, left_out: int = 2) -> str:
    console = Console(width=60)
    with console.capture() as captured:
        console.print(summary_table(measured, alarms=0, actions=0, folder=folder, left_out=left_out))
    return captured.get()


def test_the_folder_is_told_whole_with_the_command_that_shows_it() -> None:
    folder = Path("/very/long", *(f"folder {n} of a run" for n in range(8)), "stability")
    text = printed(fed(), folder)
    cells = "".join(line.split("│")[2].strip(" ") for line in text.splitlines() if line.startswith("│"))
    together = cells.replace(" ", "")
    assert together.count(str(folder).replace(" ", "")) == 2
    assert f"lightning-dcpreport'{folder}'".replace(" ", "") in together
    assert "The first 2 steps are left out" in text


def test_without_a_folder_or_warm_up_nothing_is_said_of_them() -> None:
    text = printed(fed(), None, 0)
    for words in ("recorded in", "lightning-dcp report", "left out"):
        assert words not in text


@pytest.mark.parametrize(("steps", "shown"), [(9, "-"), (10, "1.000")])
def test_of_few_steps_no_steadiness_is_told(steps: int, shown: str) -> None:
    row = next(line for line in printed(fed(steps=steps), None).splitlines() if "steadiness" in line)
    assert row.split("│")[2].strip() == shown
