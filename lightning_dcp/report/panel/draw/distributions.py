"""The step times of two runs over one another."""

from __future__ import annotations

from collections.abc import Iterator

from markupsafe import Markup

from lightning_dcp.report.panel.comparison import Comparison, Histogram
from lightning_dcp.report.panel.draw.axes import TEXT_WIDTH, Key, Scale, legend, ticks, time_unit, x_axis, y_axis
from lightning_dcp.report.panel.draw.tags import Drawing, figure, line, path, text
from lightning_dcp.report.panel.summary import RunSummary

WIDTH, LEFT, RIGHT, HEIGHT = 860, 64, 844, 240
CLASSES = ("first", "second")


def draw_distributions(comparison: Comparison) -> Drawing:
    """Both histograms as steps, with p50 and p99 of each run."""
    runs, bins = (comparison.first, comparison.second), comparison.histogram
    keys = legend([Key(c, run.name, "line") for c, run in zip(CLASSES, runs, strict=True)])
    top = 66
    xs = Scale(bins.edges_s[0], bins.edges_s[-1], LEFT, RIGHT)
    ys = Scale(0.0, max(max(shares) for shares in bins.shares) * 1.05 or 1.0, top + HEIGHT, top)
    unit = time_unit(bins.edges_s[-1])
    parts = [*y_axis(ys, LEFT, RIGHT, "steps, % of the run", factor=100.0)]
    tail = ", the last bin with all longer ones" if bins.has_tail else ""
    values = ticks(xs.low * unit.factor, xs.high * unit.factor, 10)
    parts += x_axis(xs, ys.start, f"step time, {unit.name}{tail}", values, factor=unit.factor)
    for number, (class_, run) in enumerate(zip(CLASSES, runs, strict=True)):
        parts.append(path(_outline(bins, number, xs, ys), class_))
        parts += _quantiles(run, class_, xs, ys, top - 40 + 18 * number)
    return figure(WIDTH, ys.start + 42, f"Step times of {runs[0].name} and {runs[1].name}", parts, keys)


def _outline(bins: Histogram, number: int, xs: Scale, ys: Scale) -> str:
    words = [f"M{xs(bins.edges_s[0]):.1f} {ys(0):.1f}"]
    for left, right, share in zip(bins.edges_s[:-1], bins.edges_s[1:], bins.shares[number], strict=True):
        words.append(f"L{xs(left):.1f} {ys(share):.1f}H{xs(right):.1f}")
    return "".join(words) + f"V{ys(0):.1f}"


def _quantiles(run: RunSummary, class_: str, xs: Scale, ys: Scale, y: float) -> Iterator[Markup]:
    """Lines at p50 and p99 up to a row of labels of this run."""
    places = [("p50", xs(run.p50_s)), ("p99", xs(min(run.p99_s, xs.high)))]
    near = places[1][1] - places[0][1] < 4 * TEXT_WIDTH
    for number, (name, x) in enumerate(places):
        yield line(x, ys.start, x, y + 4, f"{class_} thin")
        side = -1 if number == 0 else 1
        inside = (number == 0 and x - 34 > LEFT) or (number == 1 and x + 34 > RIGHT and not near)
        yield text(x - 3 if inside else x + 3 * max(side, 1), y, name, "label", "end" if inside else "start")
