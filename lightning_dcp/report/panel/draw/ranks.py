"""Ranks as bars: how they spend a step, and their memory."""

from __future__ import annotations

from collections.abc import Iterator

from markupsafe import Markup

from lightning_dcp.report.panel.draw.axes import Key, Scale, Unit, byte_unit, legend, ticks, time_unit, x_axis
from lightning_dcp.report.panel.draw.tags import Drawing, figure, line, rect, text
from lightning_dcp.report.panel.ranks import RankBar, RankBars
from lightning_dcp.report.plan_table import seconds

LEFT, TOP = 46.0, 20.0
TIME_WIDTH, MEMORY_WIDTH = 720.0, 370.0
PARTS = (("busy_s", "cp2", "compute"), ("transfer_s", "transfer", "transfer"), ("wait_s", "wait", "wait for others"))


def draw_rank_times(ranks: RankBars) -> Drawing:
    """Stacked bars: a mean step of each rank."""
    keys = [*(Key(class_, label) for _, class_, label in PARTS), Key("rest", "rest of the step")]
    keys += [Key("end", "planned compute", "line")] if any(bar.planned_s for bar in ranks.bars) else []
    longest = max(b.busy_s + b.transfer_s + b.wait_s + b.rest_s for b in ranks.bars) or 1.0
    xs, row = Scale(0.0, longest, LEFT, TIME_WIDTH - 16), _row(ranks)
    parts = _rank_axes(ranks, xs, longest, "mean time in a step", time_unit(longest), 8)
    for number, bar in enumerate(ranks.bars):
        y = TOP + row * number + 2
        parts += [*_label(bar, y, row), *_stack(bar, xs, y, row - 4)]
    return figure(
        TIME_WIDTH, _bottom(ranks) + 42, "Mean time of each rank in a step by what it did", parts, legend(keys)
    )


def _bottom(ranks: RankBars) -> float:
    """Where the bars of all ranks end."""
    return TOP + _row(ranks) * len(ranks.bars) + 4


def _rank_axes(ranks: RankBars, xs: Scale, largest: float, name: str, unit: Unit, count: int) -> list[Markup]:
    """The axis below the bars, and the word above their labels."""
    marks = ticks(0, largest * unit.factor, count)
    axis = x_axis(xs, _bottom(ranks), f"{name}, {unit.name}", marks, factor=unit.factor, top=TOP)
    return [*axis, text(0, TOP - 6, "rank", "axis")]


def draw_memory(ranks: RankBars) -> Drawing:
    """Bars: the peak of each rank's memory."""
    largest = max(bar.memory_bytes for bar in ranks.bars)
    xs, unit, row = Scale(0.0, largest, LEFT, MEMORY_WIDTH - 24), byte_unit(largest), _row(ranks)
    parts = _rank_axes(ranks, xs, largest, "peak memory", unit, 4)
    for number, bar in enumerate(ranks.bars):
        y = TOP + row * number + 2
        tip = f"rank {bar.rank}: {bar.memory_bytes * unit.factor:.2f} {unit.name}"
        parts += [*_label(bar, y, row), rect(LEFT, y, xs(bar.memory_bytes) - LEFT, row - 4, "memory", tip)]
    return figure(MEMORY_WIDTH, _bottom(ranks) + 42, "Peak memory of each rank", parts)


def _row(ranks: RankBars) -> float:
    return 26.0 if len(ranks.bars) <= 16 else 18.0


def _label(bar: RankBar, y: float, row: float) -> Iterator[Markup]:
    yield text(LEFT - 8, y + row / 2 + 2, str(bar.rank), "tick", "end")


def _stack(bar: RankBar, xs: Scale, y: float, height: float) -> Iterator[Markup]:
    at = 0.0
    for name, class_, label in (*PARTS, ("rest_s", "rest", "rest of the step")):
        value = getattr(bar, name)
        yield rect(xs(at), y, xs(at + value) - xs(at), height, class_, f"rank {bar.rank}, {label}: {seconds(value)}")
        at += value
    if bar.planned_s:
        yield line(xs(bar.planned_s), y - 2, xs(bar.planned_s), y + height + 2, "end")
