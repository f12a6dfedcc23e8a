"""The table at the end: how steady the run was, and what made its tail."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from lightning_dcp.callbacks.stability.measured import Measured
from lightning_dcp.metrics import HotSpot
from lightning_dcp.stability.run_lines import printable

_FEW = 10
"""Of fewer steps the median says too little for a steadiness."""
_LONGEST = 40
"""Characters of a sample's id."""


def summary_table(measured: Measured, *, alarms: int, actions: int, folder: Path | None, left_out: int = 0) -> Table:
    """One row a number, one a hot sample, one a hot kind.

    Args:
        measured: of the run.
        alarms: raised in the run.
        actions: taken.
        folder: where the record is, if there is one.
        left_out: first steps of the run that were not counted.
    """
    table = Table(title="Steadiness of the steps", show_header=False, caption=_left_out(left_out))
    table.add_column(overflow="fold")
    table.add_column(overflow="fold")
    times, throughput = measured.whole_run.compute(), measured.throughput.compute()
    for name, value in times.items():
        unit = "" if "_over_" in name else " s"
        table.add_row(f"step time, {name.replace('_over_', ' over ')}", f"{float(value):.3f}{unit}")
    table.add_row("tokens/s, last steps", f"{float(throughput['tokens_per_second']):,.0f}")
    few = len(measured.throughput.steps) < _FEW
    table.add_row("steadiness, last steps", "-" if few else f"{float(throughput['steadiness']):.3f}")
    table.add_row("alarms, actions", f"{alarms}, {actions}")
    table.add_row("slow steps", str(measured.slow))
    if measured.slow:
        _add_spots(table, "hot sample", measured.samples.compute())
        if measured.kinds.update_count:
            _add_spots(table, "hot kind", measured.kinds.compute())
    if folder is not None:
        table.add_row("recorded in", escape(str(folder)))
        table.add_row("to see why", escape(f"lightning-dcp report {shlex.quote(str(folder))}"))
    return table


def _left_out(steps: int) -> str | None:
    if not steps:
        return None
    return "The first step is left out: warm-up." if steps == 1 else f"The first {steps} steps are left out: warm-up."


def _add_spots(table: Table, label: str, spots: Sequence[HotSpot]) -> None:
    for spot in spots:
        name = printable(str(spot.name))
        shown = name if len(name) <= _LONGEST else f"{name[: _LONGEST - 3]}..."
        steps = f"{spot.steps} slow step{'s' if spot.steps > 1 else ''}, last {spot.last_step}"
        table.add_row(f"{label} {escape(shown)}", f"{spot.seconds:.3f} s over the median in {steps}")
