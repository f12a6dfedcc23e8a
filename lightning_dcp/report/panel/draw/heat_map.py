"""Links between ranks as a map: senders down, receivers across."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from markupsafe import Markup

from lightning_dcp.report.panel.draw.axes import Key, legend
from lightning_dcp.report.panel.draw.tags import Drawing, boxes, figure, rect, text
from lightning_dcp.report.panel.links import LinkCell, LinkMap
from lightning_dcp.report.plan_table import seconds

LEVELS = (1.25, 1.5, 2.0, 3.0)
"""Upper ends of the classes of colour; the last class has none."""
WRITTEN = 12
"""Most ranks of a map whose cells have their number written in them."""
MOST_TIPS = 3000
"""Links of larger maps have no tips, to keep the file small."""
SIDE = 440.0
LEFT, TOP = 70.0, 36.0


def draw_heat_map(links: LinkMap, *, bad: bool) -> Drawing:
    """The map.

    Args:
        links: of a run.
        bad: draw the mean hop of the worst 5 % of steps, instead of the typical one.
    """
    unit_s = _middle(links)
    side = min(46.0, SIDE / links.ranks)
    right, bottom = LEFT + side * links.ranks, TOP + side * links.ranks
    parts = [*_frame(links.ranks, side), *_cells(links, side, unit_s, bad)]
    what = "in the worst 5 % of steps, mean of a step's hops" if bad else "in a typical step"
    over = "expected time" if links.has_expected else "median link's time"
    title = f"Links {what}: time of a hop over the {over}"
    keys = legend([Key(f"h{i}", label) for i, label in enumerate(_labels())])
    return figure(max(right, LEFT + 90) + 8, bottom + 8, title, parts, keys)


def level(ratio: float) -> int:
    """The class of a ratio."""
    return sum(ratio > upper for upper in LEVELS)


def _labels() -> list[str]:
    ends = [f"{value:g}x" for value in LEVELS]
    return [f"up to {ends[0]}", *(f"to {end}" for end in ends[1:]), f"above {ends[-1]}"]


def _middle(links: LinkMap) -> float | None:
    """What links are compared with where no expected times are known: the median of typical times."""
    times = sorted(cell.typical_s for cell in links.cells)
    return None if links.has_expected else times[len(times) // 2]


def _ratio(cell: LinkCell, unit_s: float | None, bad: bool) -> float | None:
    if unit_s is not None:
        return cell.typical_s / unit_s if unit_s else None
    return cell.bad_ratio if bad else cell.ratio


def _frame(ranks: int, side: float) -> Iterator[Markup]:
    """Numbers of ranks at both sides, not more than have room, and what the sides are."""
    every = next(
        step for step in (1, 2, 4, 5, 8, 10, 16, 20, 32, 50, 64, 100, 128, ranks) if step * side >= 22 or step >= ranks
    )
    yield text(0, TOP - 8, "sender ↓", "axis")
    yield text(LEFT, 12, "receiver →", "axis")
    for rank in range(0, ranks, every):
        middle = side * rank + side / 2
        yield text(LEFT + middle, TOP - 6, str(rank), "tick", "middle")
        yield text(LEFT - 8, TOP + middle + 4, str(rank), "tick", "end")
    yield rect(LEFT, TOP, side * ranks, side * ranks, "empty")


def _cells(links: LinkMap, side: float, unit_s: float | None, bad: bool) -> Iterator[Markup]:
    many: dict[int, list[tuple[float, float, float, float]]] = defaultdict(list)
    gap = 1.0 if side > 8 else 0.0
    for cell in links.cells:
        ratio = _ratio(cell, unit_s, bad)
        if ratio is None:
            continue
        x, y = LEFT + side * cell.target, TOP + side * cell.source
        if len(links.cells) > MOST_TIPS:
            many[level(ratio)].append((x, y, side - gap, side - gap))
            continue
        yield rect(x, y, side - gap, side - gap, f"h{level(ratio)}", tip(cell))
        if links.ranks <= WRITTEN:
            words = "<0.1" if ratio < 0.05 else f"{ratio:.1f}" if ratio < 99.95 else f"{ratio:.0f}"
            yield text(x + side / 2, y + side / 2 + 4, words, f"small on-h{level(ratio)}", "middle")
    for number, places in many.items():
        yield boxes(places, f"h{number}")


def tip(cell: LinkCell) -> str:
    """A link in words."""
    expected = f", expected {seconds(cell.expected_s)}" if cell.expected_s else ""
    carried = (
        f"{cell.hops:,} hops, {cell.num_bytes / 2**20:,.1f} MiB, receiver held up {seconds(cell.held_up_s)} in all"
    )
    did = carried if cell.hops else "carried nothing: it was only tried"
    return f"{cell.source} to {cell.target}: a hop typically {seconds(cell.typical_s)}{expected}\n{did}"
