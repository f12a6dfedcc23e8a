"""The tables of ``lightning-dcp bench plan``."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich import box
from rich.table import Table

from lightning_dcp.commands.bench_contenders import MODES
from lightning_dcp.commands.bench_measure import ModeResult, Quality, Speed
from lightning_dcp.schedule.plan import Mode


def quality_table(results: Sequence[Quality]) -> Table:
    """One row for each workload, size and scheduler; a column of notes only if there are any."""
    table = _table("Predicted step time over its lower bound: mean and largest over the batches")
    for heading in ("workload", "size", "scheduler"):
        table.add_column(heading, no_wrap=True)
    for mode in MODES:
        for heading in (f"{mode}\nmean", "\nmax", "plan\nms"):
            table.add_column(heading, justify="right", no_wrap=True)
    notes = [_note(result) for result in results]
    if any(notes):
        table.add_column("note")
    last = None
    for result, note in zip(results, notes, strict=True):
        place = (result.workload, str(result.size))
        cells = [cell for mode in MODES for cell in _mode_cells(result.modes[mode])]
        table.add_row(
            *(place if place != last else ("", "")), result.scheduler, *cells, *([note] if any(notes) else [])
        )
        last = place
    return table


def _mode_cells(result: ModeResult) -> list[str]:
    """Mean, maximum and planning time."""
    if not result.ratios:
        return ["-", "-", "-"]
    return [f"{result.mean:.3f}", f"{result.worst:.3f}", milliseconds(result.median_planning_s)]


def _note(result: Quality) -> str:
    """Which batches the numbers leave out."""
    if not result.planned:
        return "skipped"
    notes = [] if result.planned == result.draws else [f"{result.planned} of {result.draws} batches"]
    refused: dict[str, int] = {mode: len(of_mode.refusals) for mode, of_mode in result.modes.items()}
    if len(set(refused.values())) == 1:
        refused = {"": max(refused.values())}
    notes += [f"{mode} {count} refused".strip() for mode, count in refused.items() if count]
    return ", ".join(notes)


def speed_table(results: Sequence[Speed], workload: str) -> Table:
    """One row for each size and scheduler."""
    table = _table(f"Planning time on {workload}")
    for heading in ("size", "scheduler"):
        table.add_column(heading, no_wrap=True)
    for mode in MODES:
        table.add_column(f"{mode}\nms", justify="right", no_wrap=True)
        table.add_column("\ngrowth", justify="right", no_wrap=True)
    last = None
    for result in results:
        cells = [cell for mode in MODES for cell in (_speed_cell(result, mode), _growth_cell(result, mode))]
        table.add_row("" if result.size == last else str(result.size), result.scheduler, *cells)
        last = result.size
    return table


def _speed_cell(result: Speed, mode: Mode) -> str:
    if result.skipped:
        return "skipped"
    seconds = result.planning_s[mode]
    return "refused" if seconds is None else milliseconds(seconds)


def _growth_cell(result: Speed, mode: Mode) -> str:
    growth = result.growth.get(mode)
    return "" if growth is None else f"{growth:.2f}"


def milliseconds(seconds: float) -> str:
    """Milliseconds with three digits or more: ``0.123``, ``4.56``, ``12,345``."""
    value = seconds * 1e3
    digits = max(0, 2 - math.floor(math.log10(value))) if value > 0 else 0
    return f"{value:,.{min(digits, 3)}f}"


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
