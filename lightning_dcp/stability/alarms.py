"""Slow links and slow ranks, told from records of steps: the same records give the same alarms on every rank."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from lightning_dcp.stability.pace import Pace, Work, paces
from lightning_dcp.stability.record import Event, EventKind, LinkTime, RankTime, StepRecord
from lightning_dcp.stability.settings import AlarmSettings

Link = tuple[int, int]
QUEUED = 0.05
"""Share of its busy seconds that half of the ranks have to wait for a core for the machine to be short of them."""
Subject = tuple[int, ...]
"""A link ``(source, target)`` or a rank ``(place,)``."""


def name_of(subject: Subject) -> str:
    """As events call it: ``link 2->3`` or ``rank 1``."""
    return f"link {subject[0]}->{subject[1]}" if len(subject) == 2 else f"rank {subject[0]}"


@dataclass(frozen=True)
class Sight:
    """One step of one link or rank.

    Attributes:
        step: number of the step.
        slow: whether it was slow.
        slowdown: how many times the expected seconds it took.
        cost_s: seconds beyond those expected, over the whole step.
    """

    step: int
    slow: bool
    slowdown: float
    cost_s: float


@dataclass(frozen=True)
class Alarm:
    """Something that is slow now.

    Attributes:
        subject: the link or rank.
        since_step: the first slow step.
        slowdown: the middle one of the slow steps of the window.
        cost_s: seconds of all steps since then.
    """

    subject: Subject
    since_step: int
    slowdown: float
    cost_s: float


class Alarms:
    """Keeps what is needed of the last steps, and what is slow.

    Args:
        settings: what makes an alarm.
        device_type: where packs are computed: ``cpu`` or ``cuda``.

    Attributes:
        active: what is slow now, by subject.
    """

    def __init__(self, settings: AlarmSettings, device_type: str = "cpu") -> None:
        self.active: dict[Subject, Alarm] = {}
        self._settings, self._floor_s = settings, settings.link_floor(device_type)
        self._links: dict[Link, deque[Sight]] = {}
        self._typical: dict[Link, deque[float]] = {}
        self._middles: dict[Link, float] = {}
        self._ordered: list[float] = []
        self._works: dict[int, deque[Work]] = {}

    def update(self, record: StepRecord, held: Collection[Link] = ()) -> tuple[Event, ...]:
        """Take in one step.

        Args:
            record: of the step.
            held: links whose alarm goes on until :meth:`clear`, since they are avoided and seen by tries only.

        Returns:
            Alarms that begin with it and that end with it.
        """
        return (*self._update_links(record, held), *self._update_ranks(record))

    def clear(self, subject: Subject, step: int, text: str) -> Event:
        """End an alarm; what was seen of its subject is forgotten."""
        alarm = self.active.pop(subject)
        if len(subject) == 2:
            self._links.pop((subject[0], subject[1]), None)
            self._typical.pop((subject[0], subject[1]), None)
            self._middles.pop((subject[0], subject[1]), None)
            self._ordered = sorted(self._middles.values())
        return event_of(step, "cleared", alarm, text)

    def is_slow(self, link: LinkTime) -> bool:
        """Whether a link was slow, in a step or a try: beside what is expected, and beside the others."""
        factor, floor = self._limits((link.source, link.target), self._settings.link_factor, self._floor_s)
        above = max(factor * link.expected_s, link.expected_s + floor)
        return link.typical_s > max(above, factor * self._others(link))

    def _limits(self, subject: Subject, factor: float, floor: float) -> tuple[float, float]:
        """What has to be exceeded; half as much for an alarm to go on, so that it does not come and go."""
        return (1 + (factor - 1) / 2, floor / 2) if subject in self.active else (factor, floor)

    # ---------------------------------------------------------------------- links

    def _update_links(self, record: StepRecord, held: Collection[Link]) -> Iterator[Event]:
        window = self._settings.window
        for link in record.links:
            typical = self._typical.setdefault((link.source, link.target), deque(maxlen=window))
            typical.append(link.typical_s)
            self._middles[link.source, link.target] = sorted(typical)[len(typical) // 2]
        self._ordered = sorted(self._middles.values())
        for link in record.links:
            key = link.source, link.target
            if key in held:
                continue
            slowdown = link.typical_s / link.expected_s if link.expected_s else 1.0
            cost = max(0.0, link.transfer_s - link.hops * link.expected_s)
            sights = self._links.setdefault(key, deque(maxlen=window))
            sights.append(Sight(record.step, self.is_slow(link), slowdown, cost))
            yield from self._judged(key, list(sights), record.step, lambda a, k=link: _link_text(a, k))  # type: ignore[misc]

    def _others(self, link: LinkTime) -> float:
        """What a quarter of the other links take at most; 0 where there are too few to say that it is not all of them.

        When a machine is short of breath, all links are slow at once, and none is to blame.
        """
        every, own = self._ordered, self._middles.get((link.source, link.target))
        count = len(every) - (own is not None)
        if count < 3:
            return 0.0
        at = (count - 1) // 4
        return every[at + (own is not None and at >= bisect_left(every, own))]

    # ---------------------------------------------------------------------- ranks

    def _update_ranks(self, record: StepRecord) -> Iterator[Event]:
        short = _short_of_cores(record.ranks)
        for rank in record.ranks:
            works = self._works.setdefault(rank.rank, deque(maxlen=self._settings.window))
            if rank.expected_s > 0:
                seconds = rank.busy_s - rank.queued_s if short else rank.busy_s
                works.append(Work(record.step, seconds, rank.expected_parts or (rank.expected_s,)))
        found = paces(self._works, [subject[0] for subject in self.active if len(subject) == 1])
        for place in sorted(found):
            if self._works[place][-1].step == record.step:
                sights = [self._rank_sight(place, pace) for pace in found[place]]
                yield from self._judged((place,), sights, record.step, _rank_text)

    def _rank_sight(self, place: int, pace: Pace) -> Sight:
        factor, floor = self._limits((place,), self._settings.rank_factor, self._settings.rank_floor_s)
        excess = pace.busy_s - pace.expected_s
        return Sight(pace.step, pace.ratio > factor and excess > floor, pace.ratio, max(0.0, excess))

    # ----------------------------------------------------------------------- both

    def _judged(
        self, subject: Subject, sights: list[Sight], step: int, text: Callable[[Alarm], str]
    ) -> Iterator[Event]:
        slow, settings = [sight for sight in sights if sight.slow], self._settings
        alarm = self.active.get(subject)
        if alarm is not None:
            if len(slow) <= settings.window - settings.needed:
                yield self.clear(subject, step, f"{name_of(subject)} is as fast as others again")
                return
            now = sights[-1].cost_s if sights[-1].slow else 0.0
            self.active[subject] = Alarm(subject, alarm.since_step, _slowdown(slow, alarm.slowdown), alarm.cost_s + now)
        elif len(slow) >= settings.needed:
            alarm = Alarm(subject, slow[0].step, _slowdown(slow, 1.0), math.fsum(sight.cost_s for sight in slow))
            self.active[subject] = alarm
            yield event_of(step, "alarm", alarm, text(alarm))


def _short_of_cores(ranks: Sequence[RankTime]) -> bool:
    """Whether not one rank alone waits for a core: then it is the machine that lacks them, and no rank is slow for that."""
    shares = sorted(rank.queued_s / rank.busy_s for rank in ranks if rank.busy_s > 0)
    return bool(shares) and shares[(len(shares) - 1) // 2] > QUEUED


def _slowdown(slow: list[Sight], otherwise: float) -> float:
    ratios = sorted(sight.slowdown for sight in slow)
    return ratios[len(ratios) // 2] if ratios else otherwise


def event_of(step: int, kind: EventKind, alarm: Alarm, text: str) -> Event:
    """What happened to the subject of an alarm."""
    return Event(step, kind, name_of(alarm.subject), text, alarm.slowdown, alarm.since_step, alarm.cost_s)


def _link_text(alarm: Alarm, link: LinkTime) -> str:
    return (
        f"{name_of(alarm.subject)} is slow: a hop of {link.num_bytes / link.hops / 1024:.3g} KiB takes "
        f"{1e3 * link.typical_s:.3g} ms, expected {1e3 * link.expected_s:.3g} ms; since step {alarm.since_step}, "
        f"which has cost {alarm.cost_s:.3g} s"
    )


def _rank_text(alarm: Alarm) -> str:
    return (
        f"{name_of(alarm.subject)} is slow: it computes {alarm.slowdown:.3g} times as long as others would for its work; "
        f"since step {alarm.since_step}, which has cost {alarm.cost_s:.3g} s"
    )
