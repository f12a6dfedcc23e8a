"""Step times over the run, with alarms and actions above, and load, distance and transfers below, on one axis of steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from lightning_dcp.report.panel.draw.axes import (
    TEXT_WIDTH,
    Key,
    Scale,
    apart,
    legend,
    time_unit,
    whole_ticks,
    x_axis,
    y_axis,
)
from lightning_dcp.report.panel.draw.event_marks import ROWS_HEIGHT, event_keys, event_rows
from lightning_dcp.report.panel.draw.tags import Drawing, figure, path, polyline, tag, text
from lightning_dcp.report.panel.events import EventLog
from lightning_dcp.report.panel.series import Line, StepSeries
from lightning_dcp.report.plan_table import seconds

WIDTH, LEFT, RIGHT = 1100, 64, 1084
TIME_HEIGHT, LANE_HEIGHT, GAP = 230, 64, 40
OUTLIER = 2.0
"""Times above the largest windowed p99 without the first points by this factor do not stretch the axis."""
SLOW = "M0 6 -5 -3 5 -3z"
TIME_TITLE = "step time, {}"


@dataclass(frozen=True)
class Lane:
    """One of the small plots below."""

    title: str
    lines: tuple[tuple[Line, str], ...]
    factor: float = 1.0
    least: float = 0.0


def draw_steps(series: StepSeries, events: EventLog) -> Drawing:
    """The step-time plot of a run."""
    xs = Scale(series.numbers[0], max(series.numbers[-1], series.numbers[0] + 1), LEFT, RIGHT)
    top = (ROWS_HEIGHT if events.events else 0) + 34
    ys = Scale(0.0, _highest(series), top + TIME_HEIGHT, top)
    unit = time_unit(ys.high)
    parts = [*y_axis(ys, LEFT, RIGHT, TIME_TITLE.format(unit.name), factor=unit.factor)]
    parts += [_spread(series, xs, ys), *_lines(series, xs, ys), *_slowest(series, xs, ys)]
    parts += event_rows(events, xs, 2, ys.start)
    bottom = ys.start
    for lane in _lanes(series):
        parts += _draw_lane(lane, series, xs, bottom + GAP)
        bottom += GAP + LANE_HEIGHT
    last = series.numbers[-1]
    parts += x_axis(
        xs, bottom, "step", whole_ticks(series.numbers[0], last, 10) if last > series.numbers[0] else (last,)
    )
    title = f"Step time of steps {series.numbers[0]} to {last}, with load of the ranks and communication below"
    return figure(WIDTH, bottom + 42, title, parts, legend(_keys(series, events)))


def _keys(series: StepSeries, events: EventLog) -> list[Key]:
    each = "a step" if series.steps_a_point == 1 else f"{series.steps_a_point} steps: median, shortest to longest"
    keys = [
        Key("series", each, "line"),
        Key("p50", f"p50 of the last {series.window} steps", "line"),
        Key("p99", f"p99 of the last {series.window} steps", "line"),
        Key("band", "between p50 and p99"),
    ]
    if series.predicted_s:
        keys.append(Key("predicted", "predicted by the plan, scaled", "line"))
    return [*keys, Key("slow", "slowest steps", SLOW), *event_keys(events)]


def _highest(series: StepSeries) -> float:
    """Top of the axis: the slowest step, if it is not far above all the others; seconds."""
    highs = sorted(value for value in series.high_s if value is not None)
    usual = highs[min(int(0.99 * len(highs)), len(highs) - 2)] if len(highs) > 1 else highs[0]
    top = highs[-1] if highs[-1] <= OUTLIER * usual else 1.3 * usual
    return (top or 1.0) * 1.08


def _spread(series: StepSeries, xs: Scale, ys: Scale) -> Markup:
    """The area between p50 and p99, and for points of several steps that between shortest and longest."""
    band = _area(series.numbers, series.p50_s, series.p99_s, xs, ys, "band")
    if series.steps_a_point == 1:
        return band
    return tag("g", band, _area(series.numbers, series.low_s, series.high_s, xs, ys, "spread"))


def _area(numbers: Sequence[int], low: Line, high: Line, xs: Scale, ys: Scale, class_: str) -> Markup:
    there = [(xs(n), ys(min(v, ys.high))) for n, v in zip(numbers, high, strict=True) if v is not None]
    back = [(xs(n), ys(min(v, ys.high))) for n, v in zip(numbers, low, strict=True) if v is not None]
    return path("M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in there + back[::-1]) + "z", class_)


def _lines(series: StepSeries, xs: Scale, ys: Scale) -> Iterator[Markup]:
    def drawn(values: Line, class_: str) -> Markup:
        return _curve(series.numbers, values, xs, lambda value: ys(min(value, ys.high)), class_)

    yield drawn(series.median_s, "series")
    if series.predicted_s:
        yield drawn(series.predicted_s, "predicted")
    yield drawn(series.p50_s, "p50")
    yield drawn(series.p99_s, "p99")


def _curve(numbers: Sequence[int], values: Line, xs: Scale, y: Callable[[float], float], class_: str) -> Markup:
    """A line over steps; it is broken only where values are missing for long, so that a few thinned steps do not matter."""
    points = [None if value is None else (xs(n), y(value)) for n, value in zip(numbers, values, strict=True)]
    known = [point for point in points if point is not None]
    return polyline(known if 2 * len(known) >= len(points) else points, class_)


def _slowest(series: StepSeries, xs: Scale, ys: Scale) -> Iterator[Markup]:
    """Marks at the slowest steps, and labels as far as there is room."""
    labels = [f"{number}: {seconds(value)}" for number, value in series.slowest]
    places = [(len(TIME_TITLE) * TEXT_WIDTH / 2, len(TIME_TITLE) * TEXT_WIDTH)]  # the axis' title, on the same line
    for (number, _), label in zip(series.slowest, labels, strict=True):
        width = len(label) * TEXT_WIDTH
        places.append((min(max(xs(number), LEFT + width / 2), RIGHT - width / 2), width))
    free_places = list(zip(places, apart(places), strict=True))[1:]
    for (number, value), label, ((middle, _), free) in zip(series.slowest, labels, free_places, strict=True):
        y = ys(min(value, ys.high))
        over = " (beyond the axis)" if value > ys.high else ""
        mark = tag("title", f"step {label}{over}")
        yield tag("path", mark, d=SLOW, class_="slow", transform=f"translate({xs(number):.1f} {y - 6:.1f})")
        if free:
            yield text(middle, ys.end - 12, label, "label", "middle")


def _lanes(series: StepSeries) -> Iterator[Lane]:
    if series.has_ranks:
        lines: tuple[tuple[Line, str], ...] = ((series.planned_load, "predicted"), (series.load, "series"))
        yield Lane("compute: busiest rank over the mean of all ranks (dashed: as planned)", lines, 1.0, 1.0)
    if series.has_links:
        yield Lane("distance: ranks between sender and receiver, mean over bytes", ((series.distance, "series"),))
    held = [value for value in series.held_up_s if value is not None]
    if series.has_links and held:
        unit = time_unit(max(held))
        yield Lane(f"transfer: the rank held up longest, {unit.name}", ((series.held_up_s, "series"),), unit.factor)


def _draw_lane(lane: Lane, series: StepSeries, xs: Scale, top: float) -> Iterator[Markup]:
    values = [value for line, _ in lane.lines for value in line if value is not None]
    high = max([*values, lane.least])
    ys = Scale(lane.least, high if high > lane.least else lane.least + 1.0, top + LANE_HEIGHT, top)
    yield from y_axis(ys, LEFT, RIGHT, lane.title, factor=lane.factor, about=3)
    for line, class_ in lane.lines:
        yield _curve(series.numbers, line, xs, lambda value: ys(max(value, lane.least)), class_)
