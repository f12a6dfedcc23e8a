"""Alarms and actions as marks over an axis of steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from markupsafe import Markup

from lightning_dcp.report.panel.draw.axes import Key, Scale
from lightning_dcp.report.panel.draw.tags import line, rect, tag, text
from lightning_dcp.report.panel.events import EventLog
from lightning_dcp.stability.record import Event

SHAPES = {
    "alarm": "M0 -6 6 5 -6 5z",
    "cleared": "M-5 0 -1 4 5 -5",
    "action": "M-5 -5h10v10h-10z",
    "undone": "M0 -6 6 0 0 6 -6 0z",
}
"""A filled triangle, a tick, a filled square, an open diamond."""
LABELS = {"alarm": "alarm", "cleared": "alarm cleared", "action": "action", "undone": "action undone"}
ROWS = ({"alarm", "cleared"}, {"action", "undone"})
ROW_HEIGHT = 20
ROWS_HEIGHT = 2 * ROW_HEIGHT + 8
NEAR = 12.0
"""Pixels: nearer marks of a row are one mark."""
MOST_TEXTS = 8


def event_keys(events: EventLog) -> list[Key]:
    """What the marks mean, for the legend."""
    kinds = {event.kind for event in events.events}
    return [Key(f"event {kind}", LABELS[kind], SHAPES[kind]) for kind in SHAPES if kind in kinds]


def event_rows(events: EventLog, xs: Scale, top: float, bottom: float) -> Iterator[Markup]:
    """A row of alarms with the stretches they are about, a row of actions, and lines down to ``bottom`` at both."""
    if not events.events:
        return
    for number, (name, kinds) in enumerate(zip(("alarms", "actions"), ROWS, strict=True)):
        y = top + ROW_HEIGHT * number + ROW_HEIGHT / 2
        yield text(0, y + 4, name, "tick")
        yield line(xs.start, y, xs.end, y, "grid")
        if number == 0:
            yield from _spans(events, xs, y)
        for group in _groups([event for event in events.events if event.kind in kinds], xs):
            yield from _mark(group, xs, y, bottom)


def _spans(events: EventLog, xs: Scale, y: float) -> Iterator[Markup]:
    for span in events.spans:
        since, until = (min(max(xs(step), xs.start), xs.end) for step in (span.since, span.until))
        tip = f"{span.subject}: slow from step {span.since} to {'the end' if span.is_open else f'step {span.until}'}"
        yield rect(since, y - 3, max(until - since, 2.0), 6, "span", tip)


def _groups(events: Sequence[Event], xs: Scale) -> list[list[Event]]:
    """Events of a kind that lie on one another."""
    groups: list[list[Event]] = []
    for event in events:
        near = groups and abs(xs(event.step) - xs(groups[-1][0].step)) < NEAR
        if near and groups[-1][0].kind == event.kind:
            groups[-1].append(event)
        else:
            groups.append([event])
    return groups


def _mark(group: Sequence[Event], xs: Scale, y: float, bottom: float) -> Iterator[Markup]:
    kind, x = group[0].kind, min(max(xs(group[0].step), xs.start), xs.end)
    texts = [f"step {event.step}, {LABELS[event.kind]}, {event.subject}: {event.text}" for event in group[:MOST_TEXTS]]
    texts += [f"and {len(group) - MOST_TEXTS} more"] if len(group) > MOST_TEXTS else []
    if kind in ("alarm", "action"):
        yield line(x, y + 6, x, bottom, "event-line")
    tip = tag("title", "\n".join(texts))
    yield tag("path", tip, d=SHAPES[kind], class_=f"event {kind}", transform=f"translate({x:.1f} {y:.1f})")
