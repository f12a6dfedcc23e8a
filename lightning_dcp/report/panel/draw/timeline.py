"""One step: a row for each rank, its packs with their CP size, and what it did in them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from markupsafe import Markup

from lightning_dcp.report.panel.draw.axes import Key, Scale, legend, ticks, time_unit, x_axis
from lightning_dcp.report.panel.draw.tags import Drawing, boxes, figure, line, rect, text
from lightning_dcp.report.panel.shards import named
from lightning_dcp.report.panel.timeline import StepTimeline, TimelineRow
from lightning_dcp.report.plan_table import seconds
from lightning_dcp.stability.record import PackTime

WIDTH, LEFT, RIGHT = 1100, 64, 1084
ROW, BAR, LABEL = 30, 14, 13
"""Pixels from row to row, of a bar, and of the line of text above it."""
SHADES = 5
SMALL = 5.8
"""Pixels of a character of a pack's label."""


def draw_timeline(timeline: StepTimeline, longest_s: float, cp_sizes: Sequence[int]) -> Drawing:
    """A step.

    Args:
        timeline: the step.
        longest_s: seconds that the axis reaches: the same for all steps that are compared.
        cp_sizes: of all of these steps, ascending: each has its shade.
    """
    top = 22.0
    xs = Scale(0.0, longest_s, LEFT, RIGHT)
    unit = time_unit(longest_s)
    bottom = top + ROW * len(timeline.rows) + 4
    axis = x_axis(
        xs, bottom, f"time in the step, {unit.name}", ticks(0, longest_s * unit.factor, 10), factor=unit.factor, top=top
    )
    parts = [*axis, text(0, top - 8, "rank", "axis")]
    for number, row in enumerate(timeline.rows):
        parts += _row(row, cp_sizes, xs, top + ROW * number)
    end = xs(timeline.seconds)
    parts.append(line(end, top, end, bottom, "end"))
    title = f"Step {timeline.step}, {timeline.role}: {seconds(timeline.seconds)}, {timeline.ranks} rank(s) by time"
    return figure(WIDTH, bottom + 42, title, parts, legend(_keys(timeline, cp_sizes)))


def shade(cp_size: int, cp_sizes: Sequence[int]) -> str:
    """The class of a CP size: light to dark from the smallest to the largest, the middle one if there is one size."""
    if len(cp_sizes) == 1:
        return f"cp{SHADES // 2}"
    place = cp_sizes.index(cp_size)
    return f"cp{round(place * (SHADES - 1) / (len(cp_sizes) - 1))}"


def _keys(timeline: StepTimeline, cp_sizes: Sequence[int]) -> list[Key]:
    kinds = {(s.kind, s.cp_size) for row in timeline.rows for s in row.stretches}
    keys = [
        Key(shade(size, cp_sizes), f"compute, CP {size}") for size in timeline.cp_sizes if ("compute", size) in kinds
    ]
    present = {kind for kind, _ in kinds}
    named_kinds = (("transfer", "transfer"), ("wait", "wait for others"), ("untimed", "a pack, not timed inside"))
    keys += [Key(kind, label) for kind, label in named_kinds if kind in present]
    return [*keys, Key("end", "end of the step", "line")]


def _row(row: TimelineRow, cp_sizes: Sequence[int], xs: Scale, top: float) -> Iterator[Markup]:
    y = top + LABEL
    yield text(LEFT - 8, y + BAR - 3, str(row.rank), "tick", "end")
    by_class: dict[str, list[tuple[float, float, float, float]]] = defaultdict(list)
    for stretch in row.stretches:
        class_ = shade(stretch.cp_size, cp_sizes) if stretch.kind == "compute" else stretch.kind
        x = xs(stretch.start_s)
        by_class[class_].append((x, y, xs(stretch.end_s) - x, BAR))
    for class_, places in by_class.items():
        yield boxes(places, class_)
    for pack in row.packs:
        yield from _pack(pack, xs, y)


def _pack(pack: PackTime, xs: Scale, y: float) -> Iterator[Markup]:
    """A pack's outline with what it is in the pointer's tip, and as much of its label as there is room for."""
    x, width = xs(pack.start_s), xs(pack.end_s) - xs(pack.start_s)
    yield rect(x, y, width, BAR, "pack", _tip(pack))
    dense = f", {_count(pack.dense_tokens)} dense" if pack.dense_tokens else ""
    size = f"CP {pack.cp_size}"
    for label in (
        f"{size}, {_count(pack.tokens)} tokens{dense}",
        f"{size}, {_count(pack.tokens)}",
        size,
        str(pack.cp_size),
    ):
        if len(label) * SMALL + 4 <= width:
            yield text(x + 1, y - 3, label, "small")
            return


def _tip(pack: PackTime) -> str:
    last = pack.first_rank + pack.cp_size - 1
    ranks = f"rank {last}" if pack.cp_size == 1 else f"ranks {pack.first_rank} to {last}"
    did: dict[str, float] = defaultdict(float)
    for interval in pack.intervals:
        did[interval.kind] += interval.end_s - interval.start_s
    lines = [
        f"pack {pack.number} on rank {pack.rank}: CP {pack.cp_size}, {ranks}, {seconds(pack.end_s - pack.start_s)}",
        f"{pack.tokens:,} tokens on this rank, {pack.dense_tokens:,} of them dense",
        ", ".join(f"{kind} {seconds(value)}" for kind, value in did.items()),
        f"samples: {named(pack.sample_ids, 8)}" if pack.sample_ids else "",
    ]
    return "\n".join(filter(None, lines))


def _count(tokens: int) -> str:
    return str(tokens) if tokens < 1000 else f"{tokens / 1000:.1f}K" if tokens < 99_950 else f"{tokens / 1000:.0f}K"
