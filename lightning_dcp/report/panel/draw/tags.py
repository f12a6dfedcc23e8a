"""SVG as text: every value that comes from data is escaped."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from markupsafe import Markup, escape

Value = str | int | float | None


def tag(name: str, *children: str, **attributes: Value) -> Markup:
    """An element.

    Args:
        name: of the element.
        children: text, which is escaped, or elements, which are not.
        attributes: ``class_`` is class, other underscores are dashes; None is left out; numbers have two decimals.
    """
    given = ((key.rstrip("_").replace("_", "-"), value) for key, value in attributes.items() if value is not None)
    words = "".join(f' {key}="{escape(number(v) if isinstance(v, int | float) else v)}"' for key, v in given)
    return Markup("<{0}{1}>{2}</{0}>").format(name, Markup(words), Markup("").join(children))


def number(value: float) -> str:
    """A coordinate, with two decimals where it has them."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class Drawing:
    """A figure of the page.

    Attributes:
        legend: what its marks and colours mean, as HTML; empty where it needs none.
        svg: the picture.
        title: what is drawn, in words.
    """

    legend: Markup
    svg: Markup
    title: str


def figure(width: float, height: float, title: str, parts: Iterable[str], legend: Markup | None = None) -> Drawing:
    """A drawing.

    Args:
        width: pixels; it is shown at this size, and may be scrolled.
        height: pixels.
        title: what is drawn, for readers who do not see it.
        parts: its elements.
        legend: of the drawing.
    """
    svg = tag(
        "svg",
        tag("title", title),
        *parts,
        width=width,
        height=height,
        viewBox=f"0 0 {number(float(width))} {number(float(height))}",
        role="img",
        aria_label=title,
    )
    return Drawing(legend or Markup(), svg, title)


def text(
    x: float, y: float, words: str, class_: str = "label", anchor: str | None = None, tip: str | None = None
) -> Markup:
    """A line of text; ``y`` is its base line."""
    inside = [tag("title", tip)] if tip else []
    return tag("text", *inside, words, x=x, y=y, class_=class_, text_anchor=anchor)


def rect(x: float, y: float, width: float, height: float, class_: str, tip: str | None = None) -> Markup:
    """A rectangle, with what a pointer over it shows."""
    inside = [tag("title", tip)] if tip else []
    return tag("rect", *inside, x=x, y=y, width=max(width, 0.0), height=max(height, 0.0), class_=class_)


def line(x1: float, y1: float, x2: float, y2: float, class_: str) -> Markup:
    """A straight line."""
    return tag("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=class_)


def path(d: str, class_: str, tip: str | None = None) -> Markup:
    """A path."""
    return tag("path", *([tag("title", tip)] if tip else []), d=d, class_=class_)


DOT = "m-1.5 0a1.5 1.5 0 1 0 3 0a1.5 1.5 0 1 0-3 0"
"""A small circle around the point that a path is at."""


def polyline(points: Iterable[tuple[float, float] | None], class_: str) -> Markup:
    """A line through points; None breaks it. A point between two breaks is a dot."""
    words, pen_up, alone = [], True, False
    for point in points:
        if point is None:
            words += [DOT] if alone else []
            pen_up, alone = True, False
            continue
        words.append(f"{'M' if pen_up else 'L'}{point[0]:.1f} {point[1]:.1f}")
        alone, pen_up = pen_up, False
    return path("".join(words + ([DOT] if alone else [])), class_)


def boxes(rectangles: Iterable[tuple[float, float, float, float]], class_: str) -> Markup:
    """Many rectangles (x, y, width, height) as one path, to keep the file small."""
    return path("".join(f"M{x:.1f} {y:.1f}h{w:.1f}v{h:.1f}h-{w:.1f}z" for x, y, w, h in rectangles), class_)
