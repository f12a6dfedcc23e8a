"""Shards by tokens and dense tokens, with the budgets as lines."""

from __future__ import annotations

from collections.abc import Iterator

from markupsafe import Markup

from lightning_dcp.report.panel.draw.axes import TEXT_WIDTH, Key, Scale, legend, ticks, x_axis, y_axis
from lightning_dcp.report.panel.draw.tags import Drawing, figure, line, tag, text
from lightning_dcp.report.panel.shards import ShardBudgets, ShardPoint

WIDTH, LEFT, RIGHT = 860, 64, 844
HEIGHT, FLAT = 300, 60
"""Pixels; the second one where nothing is dense and no budget is of dense tokens."""
INSIDE = "M-3 0a3 3 0 1 0 6 0a3 3 0 1 0 -6 0z"
OVER = "M-5 -5 5 5M-5 5 5 -5"


def draw_shards(shards: ShardBudgets) -> Drawing:
    """A point for each shard."""
    top = 34
    most = max([*(point.tokens for point in shards.points), shards.max_tokens or 0, 1])
    densest = max([*(point.dense_tokens for point in shards.points), shards.dense_limit or 0, 1])
    xs = Scale(0.0, most * 1.04, LEFT, RIGHT)
    ys = Scale(0.0, densest * 1.08, top + (HEIGHT if densest > 1 else FLAT), top)
    parts = [*y_axis(ys, LEFT, RIGHT, "dense tokens of the shard", about=min(densest, 5))]
    parts += x_axis(xs, ys.start, "tokens of the shard", ticks(0, xs.high, 10))
    parts += [*_budgets(shards, xs, ys), *(_point(point, xs, ys) for point in shards.points)]
    return figure(
        WIDTH, ys.start + 42, "Tokens and dense tokens of shards against their budgets", parts, legend(_keys(shards))
    )


def _keys(shards: ShardBudgets) -> list[Key]:
    keys = [Key("shard", "a shard: one rank's part of one pack", INSIDE)]
    if any(point.over for point in shards.points):
        keys.append(Key("shard-over", "over a budget", OVER))
    if shards.max_tokens or shards.dense_limit:
        keys.append(Key("budget", "budget", "line"))
    return keys


def _budgets(shards: ShardBudgets, xs: Scale, ys: Scale) -> Iterator[Markup]:
    if shards.max_tokens:
        x = xs(shards.max_tokens)
        label = f"max_tokens {shards.max_tokens:,}"
        yield line(x, ys.start, x, ys.end, "budget")
        yield text(
            min(x, RIGHT), ys.end - 8, label, "label", "end" if x > LEFT + 200 + len(label) * TEXT_WIDTH else "start"
        )
    if shards.dense_limit:
        y = ys(shards.dense_limit)
        yield line(xs.start, y, xs.end, y, "budget")
        yield text(LEFT + 6, y - 5, f"dense_limit {shards.dense_limit:,}", "label halo")


def _point(point: ShardPoint, xs: Scale, ys: Scale) -> Markup:
    words = (
        f"step {point.step}, rank {point.rank}, CP {point.cp_size}: {point.tokens:,} tokens, {point.dense_tokens:,} dense"
        + (f"\nsamples: {point.samples}" if point.samples else "")
    )
    place = f"translate({xs(point.tokens):.1f} {ys(point.dense_tokens):.1f})"
    shape, class_ = (OVER, "shard-over") if point.over else (INSIDE, "shard")
    return tag("path", tag("title", words), d=shape, class_=class_, transform=place)
