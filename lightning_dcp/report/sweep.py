"""A sweep over CP sizes and token limits as a table and as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from lightning_dcp.report.figure import BOUND, colours, new_figure
from lightning_dcp.report.plan_table import seconds

Times = Mapping[str, Mapping[int, float | None]]
"""Seconds of a step by row (a way to plan) and ``max_seqlen_per_dp_cp_rank``; ``None``: cannot be planned so."""
Choice = tuple[str, int]
"""A row and a limit."""

MARKERS = "os^vDP*Xph"
WIDE = 6.0
"""Range of times, as a factor, from which the axis is logarithmic."""
MARGIN = 1.25
"""Room beside the smallest and largest limit, as a factor."""


def sweep_table(times: Times, recommended: Choice) -> Table:
    """Step times, ways to plan by limits; the recommended one is marked with a star."""
    table = Table(title="predicted step time by limit (* recommended)", title_justify="left", title_style="bold")
    table.add_column("max_seqlen_per_dp_cp_rank")
    for limit in next(iter(times.values())):
        table.add_column(f"{limit:,}", justify="right")
    for name, row in times.items():
        table.add_row(name, *(_text(value, (name, limit) == recommended) for limit, value in row.items()))
    return table


def _text(value: float | None, recommended: bool) -> str:
    text = "-" if value is None else seconds(value)
    return f"[bold]* {text}[/bold]" if recommended else text


def draw_sweep(path: str | Path, times: Times, recommended: Choice, *, title: str) -> None:
    """Draw step time by limit, one line for each way to plan, the last one thick; what cannot run is left out.

    Args:
        path: file to write; its ending decides the format.
        times: what to draw.
        recommended: the point to mark.
        title: what is shown.

    Raises:
        ConfigurationError: matplotlib is not installed.
    """
    figure = new_figure(9, 5)
    axes = figure.subplots()
    static = colours(list(range(len(times) - 1)))
    for number, (name, row) in enumerate(times.items()):
        style: dict[str, Any] = {"color": static.get(number, BOUND), "linewidth": 1.5 if number in static else 3.0}
        shown = {limit: value for limit, value in row.items() if value is not None}
        if shown:
            axes.plot(*zip(*shown.items(), strict=True), marker=MARKERS[number % len(MARKERS)], label=name, **style)
    _mark(axes, times, recommended)
    _scale_times(axes, [value for row in times.values() for value in row.values() if value is not None])
    _label(axes, list(next(iter(times.values()))), title)
    figure.savefig(path, dpi=150)


def _mark(axes: Any, times: Times, recommended: Choice) -> None:
    name, limit = recommended
    ring = {"markersize": 16, "markerfacecolor": "none", "markeredgecolor": "black"}
    axes.plot(limit, times[name][limit], "o", label="recommended", **ring)


def _scale_times(axes: Any, values: list[float]) -> None:
    """From zero, or logarithmic where the fast settings would lie on the axis."""
    if max(values) < WIDE * min(values):
        axes.set_ylim(bottom=0)
        return
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.tick_params(axis="y", which="minor", labelsize=7)


def _label(axes: Any, limits: list[int], title: str) -> None:
    from matplotlib.ticker import NullLocator

    axes.set_xscale("log", base=2)
    axes.set_xticks(limits, [f"{limit:,}" for limit in limits])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlim(limits[0] / MARGIN, limits[-1] * MARGIN)
    axes.set_xlabel("max_seqlen_per_dp_cp_rank, tokens")
    axes.set_ylabel("predicted step time, s")
    axes.set_title(title, loc="left", fontsize=10)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
