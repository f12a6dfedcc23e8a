"""``lightning-dcp report``: the stability panel of a run."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from lightning_dcp.errors import raise_problems
from lightning_dcp.report.figure import folder_problems
from lightning_dcp.report.panel import Panel, panel_of, write_panel
from lightning_dcp.stability.run_folder import RunFolder


def report(run_dir: str, *, compare: str | None = None, output: str = "panel.html") -> Panel:
    """Show why a run's steps were steady, or why not, in one HTML file that needs no network.

    Args:
        run_dir: what a run with the StabilityMonitor callback logged to: its log folder, or the folder `stability` in it.
        compare: another run's folder, to be shown side by side (a static beside a dynamic run, for instance).
        output: the file to write.

    Raises:
        ConfigurationError: the output cannot be written.
        DataError: a folder holds no record of a run, a broken one, or one without a step.
    """
    raise_problems(folder_problems(output, "--output"))
    panel = panel_of(RunFolder.read(run_dir), None if compare is None else RunFolder.read(compare))
    write_panel(output, panel)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    console.print(f"{panel.summary.name}: {panel.summary.verdict}")
    if panel.comparison is not None:
        console.print(panel.comparison.verdict)
    console.print(f"wrote {Path(output)}")
    return panel
