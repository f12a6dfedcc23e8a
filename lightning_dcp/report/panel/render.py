"""The panel's values as one HTML file: style, drawings and tables in it, and nothing that is loaded or run."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from lightning_dcp.report.panel.draw.distributions import draw_distributions
from lightning_dcp.report.panel.draw.event_marks import LABELS
from lightning_dcp.report.panel.draw.heat_map import draw_heat_map
from lightning_dcp.report.panel.draw.ranks import draw_memory, draw_rank_times
from lightning_dcp.report.panel.draw.shards import draw_shards
from lightning_dcp.report.panel.draw.steps import draw_steps
from lightning_dcp.report.panel.draw.tags import Drawing
from lightning_dcp.report.panel.draw.timeline import draw_timeline
from lightning_dcp.report.panel.panel import Panel
from lightning_dcp.report.panel.shards import short
from lightning_dcp.report.panel.texts import comparison_rows, main_cause, numbers, ratio, shard_words
from lightning_dcp.report.plan_table import seconds

SECTIONS = (
    ("comparison", "Comparison"),
    ("steps", "Step times"),
    ("reasons", "Slowest steps"),
    ("timelines", "Steps in time"),
    ("links", "Links"),
    ("ranks", "Ranks"),
    ("shards", "Shards"),
    ("hot", "Hot samples"),
    ("events", "Alarms and actions"),
    ("facts", "The run"),
    ("words", "Words"),
)
"""Names of the sections' anchors, and how the page's list calls them."""


def write_panel(path: str | Path, panel: Panel) -> None:
    """Write the panel's file.

    Raises:
        OSError: it cannot be written.
    """
    # paths of folders that are no UTF-8 are written with escapes
    Path(path).write_text(render(panel), encoding="utf-8", errors="backslashreplace")


def render(panel: Panel) -> str:
    """The page. All text of the run's data is escaped."""
    environment = Environment(
        loader=PackageLoader("lightning_dcp.report.panel"), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters.update(time=seconds, count=lambda value: f"{value:,}", short=short, ratio=ratio)
    template = environment.get_template("panel.html")
    return template.render(**_texts(panel), **_drawings(panel))


def _texts(panel: Panel) -> dict[str, Any]:
    style = files("lightning_dcp.report.panel").joinpath("templates", "panel.css").read_text(encoding="utf-8")
    one = panel.summary.ranks == 1
    return {
        "panel": panel,
        "summary": panel.summary,
        "css": Markup(style),
        "sections": [s for s in SECTIONS if s[0] != "comparison" or panel.comparison],
        "numbers": numbers(panel.summary),
        "main_cause": main_cause(panel.reasons),
        "comparison_rows": comparison_rows(panel.comparison) if panel.comparison else (),
        "shard_words": shard_words(panel.shards),
        "no_links": "One rank: nothing is sent." if one else "No links were measured: either nothing was sent between "
        "ranks hop by hop, or the timing of hops was off.",
        "labels": LABELS,
    }  # fmt: skip


def _drawings(panel: Panel) -> dict[str, Any]:
    longest = max((timeline.seconds for timeline in panel.timelines), default=0.0)
    cp_sizes = sorted({size for timeline in panel.timelines for size in timeline.cp_sizes})
    heat_maps: list[tuple[str, Drawing]] = []
    if panel.links.cells:
        heat_maps.append(("In a typical step", draw_heat_map(panel.links, bad=False)))
    if panel.links.has_expected:
        heat_maps.append(("In the worst 5 % of steps", draw_heat_map(panel.links, bad=True)))
    return {
        "distributions": draw_distributions(panel.comparison) if panel.comparison else None,
        "steps_drawing": draw_steps(panel.series, panel.events),
        "timelines": [(timeline, draw_timeline(timeline, longest, cp_sizes)) for timeline in panel.timelines],
        "heat_maps": heat_maps,
        "rank_times": draw_rank_times(panel.ranks) if panel.ranks.bars else None,
        "memory": draw_memory(panel.ranks) if panel.ranks.has_memory else None,
        "shards": draw_shards(panel.shards) if panel.shards.points else None,
    }
