"""Plans as timelines: ranks by time, packs coloured by CP size, idle time hatched."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_dcp.report.figure import BOUND, colours, ink_on, new_figure
from lightning_dcp.report.plan_table import seconds
from lightning_dcp.schedule.plan import StepPlan
from lightning_dcp.schedule.simulate import PackRun, Simulation

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 12.0
LABEL = (0.42, 0.13)
"""Inches, width and height, that a number in a bar needs."""
LONG_LABEL = (0.95, 0.3)
"""The same for two lines."""
IDLE: dict[str, Any] = {"facecolor": "white", "edgecolor": "#9a9a9a", "hatch": "////"}
MOST_TICKS = 16
THICKEST = 0.8
"""Points of the line that sets packs apart, where there is room for it."""


@dataclass(frozen=True)
class Panel:
    """One plan in time.

    Attributes:
        name: such as ``static CP 4``.
        plan: the plan.
        simulation: the same plan, simulated.
        lower_bound_s: seconds that no plan of the batch can beat.
    """

    name: str
    plan: StepPlan
    simulation: Simulation
    lower_bound_s: float

    def heading(self) -> str:
        """Its numbers in a line."""
        step_s = self.simulation.step_s
        share = self.lower_bound_s / step_s if step_s else 1.0
        return f"{self.name}: {seconds(step_s)} (lower bound: {share:.0%} of it), ranks busy {self.simulation.busy_share:.0%}"


def draw_timeline(path: str | Path, panels: Sequence[Panel], *, title: str) -> None:
    """Draw plans of the same batch one above the other, on one time axis.

    Args:
        path: file to write; its ending decides the format.
        panels: the plans, top to bottom.
        title: what is shown, one line or more.

    Raises:
        ConfigurationError: matplotlib is not installed.
    """
    timeline_figure(panels, title=title).savefig(path, dpi=150)


def timeline_figure(panels: Sequence[Panel], *, title: str) -> Figure:
    """The figure that :func:`draw_timeline` writes."""
    ranks = panels[0].simulation.ranks
    height = min(max(0.3 * ranks, 1.9), 4.2)
    figure = new_figure(WIDTH, (height + 0.5) * len(panels) + 1.2)
    sizes = sorted({run.pack.cp_size for panel in panels for run in panel.simulation.runs})
    colour_of = colours(sizes)
    longest = max(panel.simulation.step_s for panel in panels)
    all_axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    unit, factor = ("s", 1.0) if longest >= 1 else ("ms", 1e3)
    for axes, panel in zip(all_axes, panels, strict=True):
        axes.set_xlim(0, longest * factor * 1.09)
        _draw_panel(axes, panel, colour_of, factor, height)
        axes.axvline(panel.lower_bound_s * factor, color=BOUND, linestyle="--", linewidth=1.6, zorder=5)
    all_axes[-1].set_xlabel(f"time in the step, {unit}")
    figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    _add_legend(figure, colour_of, panels[0].lower_bound_s)
    return figure


def _draw_panel(axes: Axes, panel: Panel, colour_of: dict[int, str], factor: float, height: float) -> None:
    """One plan; ``factor`` turns seconds into the axis' unit, ``height`` is the panel's, in inches."""
    simulation = panel.simulation
    step, ranks = simulation.step_s * factor, simulation.ranks
    _draw_bars(axes, simulation, colour_of, factor, height)
    for run, text in _labels(panel, axes.get_xlim()[1] / factor, height):
        middle = ((run.start + run.end) / 2 * factor, run.pack.first_rank + (run.pack.cp_size - 1) / 2)
        colour = colour_of[run.pack.cp_size]
        under = {"facecolor": colour, "edgecolor": "none", "pad": 0.6}  # keeps the line of the bound out of the text
        axes.text(*middle, text, ha="center", va="center", fontsize=7, color=ink_on(colour), zorder=7, bbox=under)
    axes.plot([step, step], [-0.5, ranks - 0.5], color="black", linewidth=1.8, zorder=6, clip_on=False)
    end = f" {seconds(simulation.step_s)}"
    axes.text(step, ranks / 2 - 0.5, end, va="center", fontsize=10, weight="bold", zorder=6)
    axes.set_ylim(ranks - 0.5, -0.5)
    axes.set_yticks(range(0, ranks, -(-ranks // MOST_TICKS)))
    axes.set_ylabel("rank")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(panel.heading(), loc="left", fontsize=10)


def _draw_bars(axes: Axes, simulation: Simulation, colour_of: dict[int, str], factor: float, height: float) -> None:
    """The packs, over a hatched area that stays visible where a rank is idle."""
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    ranks, runs = simulation.ranks, simulation.runs
    idle = Rectangle((0, -0.5), simulation.step_s * factor, ranks, linewidth=0, zorder=1, **IDLE)
    axes.add_patch(idle)
    bars = [
        Rectangle((run.start * factor, run.pack.first_rank - 0.5), (run.end - run.start) * factor, run.pack.cp_size)
        for run in runs
    ]
    fill = [colour_of[run.pack.cp_size] for run in runs]
    line = min(THICKEST, 0.12 * height * 72 / ranks)  # never more than an eighth of a row of points
    axes.add_collection(PatchCollection(bars, facecolor=fill, edgecolor="white", linewidth=line, zorder=2))


def _labels(panel: Panel, span_s: float, height: float) -> Iterator[tuple[PackRun, str]]:
    """The bars large enough for text, and that text: the tokens of the pack, and its samples where there is room."""
    for run in panel.simulation.runs:
        wide = (run.end - run.start) / span_s * (WIDTH - 1.0)
        tall = run.pack.cp_size / panel.simulation.ranks * height
        tokens, samples = run.pack.tokens(panel.plan.lengths), len(run.pack.samples)
        if wide >= LONG_LABEL[0] and tall >= LONG_LABEL[1]:
            yield run, f"{_short(tokens)} tokens\n{samples:,} sample{'s' if samples > 1 else ''}"
        elif wide >= LABEL[0] and tall >= LABEL[1]:
            yield run, _short(tokens)


def _short(tokens: int) -> str:
    return str(tokens) if tokens < 1000 else f"{tokens / 1000:.1f}K" if tokens < 99_950 else f"{tokens / 1000:.0f}K"


def _add_legend(figure: Figure, colour_of: dict[int, str], lower_bound_s: float) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Patch | Line2D] = [Patch(color=colour, label=f"CP {size}") for size, colour in colour_of.items()]
    handles.append(Patch(label="idle", **IDLE))
    bound = f"lower bound, {seconds(lower_bound_s)}"
    handles.append(Line2D([], [], color=BOUND, linestyle="--", linewidth=1.6, label=bound))
    handles.append(Line2D([], [], color="black", linewidth=1.8, label="end of the step"))
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 12), fontsize=9, frameon=False)
