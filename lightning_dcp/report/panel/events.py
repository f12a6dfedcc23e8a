"""Alarms and actions, and the stretches of steps that alarms are about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_dcp.stability.record import Event, StepRecord

MOST_ROWS = 200


@dataclass(frozen=True)
class AlarmSpan:
    """From the first slow step to the alarm's end.

    Attributes:
        subject: the link or rank.
        since: first slow step.
        until: step at whose end it was cleared, or the run's last one.
        is_open: whether it was not cleared.
    """

    subject: str
    since: int
    until: int
    is_open: bool


@dataclass(frozen=True)
class EventLog:
    """All alarms and actions.

    Attributes:
        events: in order; of very many, those that cost most.
        total: how many there were.
        spans: of alarms, in order of their beginning.
    """

    events: tuple[Event, ...]
    total: int
    spans: tuple[AlarmSpan, ...]


def event_log(records: Sequence[StepRecord]) -> EventLog:
    """The alarms and actions of a run."""
    every = [event for record in records for event in record.events]
    kept = set(sorted(range(len(every)), key=lambda i: (-every[i].cost_s, i))[:MOST_ROWS])
    shown = tuple(event for i, event in enumerate(every) if i in kept)
    return EventLog(shown, len(every), _spans(every, records[-1].step if records else 0))


def _spans(events: Sequence[Event], last_step: int) -> tuple[AlarmSpan, ...]:
    begun: dict[str, Event] = {}
    spans = []
    for event in events:
        if event.kind == "alarm":
            begun.setdefault(event.subject, event)
        elif event.kind == "cleared" and event.subject in begun:
            spans.append(AlarmSpan(event.subject, begun.pop(event.subject).since_step, event.step, False))
    spans += [AlarmSpan(subject, event.since_step, last_step, True) for subject, event in begun.items()]
    return tuple(sorted(spans, key=lambda span: (span.since, span.subject)))
