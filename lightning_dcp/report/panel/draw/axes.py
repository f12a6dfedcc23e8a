"""Scales, ticks and axes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from lightning_dcp.report.panel.draw.tags import line, tag, text

TEXT_WIDTH = 6.6
"""Pixels of a character of a label, on average; an upper bound for most texts."""


@dataclass(frozen=True)
class Scale:
    """Values to pixels, linearly."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """The pixel of a value."""
        span = self.high - self.low
        return self.start if not span else self.start + (value - self.low) / span * (self.end - self.start)


@dataclass(frozen=True)
class Unit:
    """A unit of an axis: a value times ``factor`` is what its labels say."""

    name: str
    factor: float


def time_unit(longest_s: float) -> Unit:
    """Seconds, milliseconds or microseconds, for times up to this one."""
    if longest_s >= 2.0:
        return Unit("s", 1.0)
    return Unit("ms", 1e3) if longest_s >= 2e-3 else Unit("µs", 1e6)


def byte_unit(largest: float) -> Unit:
    """GiB or MiB, for sizes up to this one."""
    return Unit("GiB", 2.0**-30) if largest >= 2.0**30 else Unit("MiB", 2.0**-20)


def ticks(low: float, high: float, about: int) -> tuple[float, ...]:
    """Round values in a range: steps of 1, 2 or 5 times a power of ten.

    Args:
        low: of the range.
        high: of the range.
        about: how many there may be at most.
    """
    if not high > low:
        return (low,)
    raw = (high - low) / max(about, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return tuple(i * step for i in range(first, math.floor(high / step + 1e-9) + 1))


def whole_ticks(low: int, high: int, about: int) -> tuple[int, ...]:
    """The same in whole numbers."""
    return tuple(sorted({round(value) for value in ticks(low, high, min(about, max(high - low, 1)))}))


def plain(value: float) -> str:
    """A tick's label."""
    return f"{value:,.0f}" if abs(value) >= 1000 or value == round(value) else f"{value:.6g}"


def y_axis(
    scale: Scale, left: float, right: float, title: str, *, factor: float = 1.0, about: int = 5
) -> Iterator[Markup]:
    """Grid lines with labels at the left, and the axis' title above them.

    Args:
        scale: of the values; ``start`` is the lower edge.
        left: pixel of the plot's left edge.
        right: of its right edge.
        title: what is measured, and its unit.
        factor: labels are values times this.
        about: most ticks.
    """
    for value in ticks(scale.low * factor, scale.high * factor, about):
        y = scale(value / factor)
        yield line(left, y, right, y, "grid")
        yield text(left - 6, y + 4, plain(value), "tick", "end")
    yield text(0, scale.end - 10, title, "axis")


def x_axis(
    scale: Scale, bottom: float, title: str, values: Sequence[float], *, factor: float = 1.0, top: float | None = None
) -> Iterator[Markup]:
    """A base line, ticks with labels, and the title under them.

    Args:
        scale: of the values.
        bottom: pixel of the plot's lower edge; 36 pixels below it are used.
        title: what is measured, and its unit.
        values: where the ticks are, times ``factor``.
        factor: labels are values times this.
        top: pixel up to which grid lines go; None for none.
    """
    yield line(scale.start, bottom, scale.end, bottom, "base")
    for value in values:
        x = scale(value / factor)
        yield line(x, bottom, x, bottom + 4, "base") if top is None else line(x, top, x, bottom + 4, "grid")
        yield text(x, bottom + 17, plain(value), "tick", "middle")
    yield text((scale.start + scale.end) / 2, bottom + 34, title, "axis", "middle")


@dataclass(frozen=True)
class Key:
    """An entry of a legend: how it looks, and what it means.

    Attributes:
        class_: of the drawing.
        label: what it means.
        shape: ``box``, ``line`` or the path of a mark around (0, 0).
    """

    class_: str
    label: str
    shape: str = "box"


def legend(keys: Sequence[Key]) -> Markup:
    """Keys as a list of the page, which wraps where the page is narrow."""
    entries = (tag("li", _swatch(key), tag("span", key.label)) for key in keys)
    return tag("ul", *entries, class_="legend")


def _swatch(key: Key) -> Markup:
    if key.shape == "box":
        inside = tag("rect", x=0, y=1, width=18, height=12, class_=key.class_)
    elif key.shape == "line":
        inside = line(0, 7, 18, 7, key.class_)
    else:
        inside = tag("path", d=key.shape, class_=key.class_, transform="translate(9 7)")
    return tag("svg", inside, width=18, height=14, viewBox="0 0 18 14", aria_hidden="true", focusable="false")


def apart(places: Sequence[tuple[float, float]], gap: float = 4.0) -> list[bool]:
    """Which labels can be written without touching those before them.

    Args:
        places: middle and width of each, in pixels, on one line, most wanted first.
        gap: pixels between two.
    """
    kept: list[tuple[float, float]] = []
    found = []
    for middle, width in places:
        free = all(abs(middle - other) >= (width + other_width) / 2 + gap for other, other_width in kept)
        found.append(free)
        kept += [(middle, width)] if free else []
    return found
