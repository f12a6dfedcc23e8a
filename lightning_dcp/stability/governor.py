"""What is done about slow links and ranks, and undone when they are sound again."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection
from dataclasses import dataclass, replace

from lightning_dcp.parallel.link_table import LinkTable
from lightning_dcp.parallel.ring_orders import RingOrders
from lightning_dcp.stability.alarms import Alarm, Alarms, Link, Subject, event_of, name_of
from lightning_dcp.stability.detours import Detour, Detours
from lightning_dcp.stability.record import Event, StepRecord
from lightning_dcp.stability.settings import AlarmSettings

Group = tuple[int, int]
"""First rank and size of a CP group."""
AROUND = "all_gather"
"""The exchange scheme of groups whose ring cannot do without a slow link: each share crosses it once, not hop by hop."""
SLOWEST = 0.1
"""Speed that a rank is said to have at least: one without any work would never be seen to be sound again."""
SAME = 1.25
"""A speed is told anew when it is off by this factor."""
IDLE = 20
"""Steps without any work after which a slow rank is said to be faster than it was, so that it gets some."""


@dataclass(frozen=True)
class Fallback:
    """What is in force; the same on all ranks.

    Attributes:
        orders: the rings of all groups.
        around: groups that use :data:`AROUND` instead of what was asked for.
        rank_speeds: for the planner; None: all ranks are alike.
    """

    orders: RingOrders
    around: frozenset[Group] = frozenset()
    rank_speeds: tuple[float, ...] | None = None

    def scheme_for(self, first_rank: int, size: int) -> str | None:
        """The exchange scheme of a group if it is not the one asked for."""
        return AROUND if (first_rank, size) in self.around else None

    def digest(self) -> int:
        """A 63-bit hash, equal where the same is in force."""
        speeds = None if self.rank_speeds is None else [speed.hex() for speed in self.rank_speeds]
        text = repr((self.orders.digest(), sorted(self.around), speeds))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


class Governor:
    """Decides at the border of two steps, from what all ranks know: each rank has its own, and all decide alike.

    A link that is slow for long is left out of all rings where an order without it exists; other groups that cross it change
    their exchange scheme. It is tried every few steps then, by these two ranks alone, and used again when it is sound. A
    rank that is slow for long gets less work, in the share of its speed.

    Args:
        settings: what makes an alarm.
        orders: rings in force while nothing is slow.
        table: of links, if they were measured.
        takes_speeds: whether the scheduler can give a rank less work.
        rank_speeds: speeds that the user gave; None: all alike.
        ring: whether exchanges are rings: others are not changed, as they have no hops.
        fallback: ``False``: alarms only.
        device_type: where packs are computed.

    Attributes:
        state: what is in force.
        alarms: what is slow now.
    """

    def __init__(
        self,
        settings: AlarmSettings,
        orders: RingOrders,
        *,
        table: LinkTable | None = None,
        takes_speeds: bool = True,
        rank_speeds: tuple[float, ...] | None = None,
        ring: bool = True,
        fallback: bool = True,
        device_type: str = "cpu",
    ) -> None:
        self.state = Fallback(orders, rank_speeds=rank_speeds)
        self.alarms = Alarms(settings, device_type)
        self._settings, self._orders, self._table = settings, orders, table
        self._takes_speeds, self._given, self._ring, self._on = takes_speeds, rank_speeds, ring, fallback
        self._detours = Detours(settings)
        self._speeds: dict[int, float] = {}
        self._found: dict[frozenset[Link], tuple[RingOrders, frozenset[Group]]] = {}
        self._worked: dict[int, int] = {}

    def decide(self, record: StepRecord) -> StepRecord:
        """Take in one step; the record with what began, ended, was done and undone at its end."""
        events = list(self.alarms.update(record, self._detours.open))
        before = self.state
        for event in tuple(events):
            subject = subject_of(event)
            if self._on and event.kind == "alarm":
                events += self._act(record, self.alarms.active[subject])
            elif self._on and event.kind == "cleared" and subject[0] in self._speeds and len(subject) == 1:
                events.append(self._undo_speed(subject[0], record.step, event))
        if self._on:
            events += self._follow_links(record)
            events += self._follow_ranks(record)
        self._put_in_force(before)
        return replace(record, events=(*record.events, *events))

    def probes_due(self) -> tuple[tuple[Link, int], ...]:
        """Links to be tried now, before the next step, and bytes of a message."""
        return self._detours.due

    # ---------------------------------------------------------------------- links

    def _act(self, record: StepRecord, alarm: Alarm) -> list[Event]:
        if len(alarm.subject) == 1:
            return [self._slow_rank(record.step, alarm)]
        link = alarm.subject[0], alarm.subject[1]
        if not self._ring:
            return [
                event_of(record.step, "action", alarm, f"nothing is done about {name_of(link)}: no exchange is a ring")
            ]
        seen = next(k for k in record.links if (k.source, k.target) == link)
        self._detours.begin(link, Detour(record.step, seen.num_bytes // seen.hops))
        _, stuck = self._around()
        text = f"rings go around {name_of(link)} where they can"
        crossing = sorted(group for group in stuck if _crosses(group, link))
        if crossing:
            text += f"; groups that cannot go around it use {AROUND} instead: {', '.join(map(_name, crossing))}"
        return [event_of(record.step, "action", alarm, text)]

    def _follow_links(self, record: StepRecord) -> list[Event]:
        """Count tries of avoided links; use those again that are sound, and say which are to be tried next."""
        events = []
        slow = {(k.source, k.target): self.alarms.is_slow(k) for k in record.probes}
        for link in self._detours.step(record.step, slow):
            alarm = self.alarms.active[link]
            text = f"{name_of(link)} is as fast as others again: its tries take what is expected"
            events.append(self.alarms.clear(link, record.step, text))
            events.append(event_of(record.step, "undone", alarm, f"rings use {name_of(link)} again"))
        return events

    # ---------------------------------------------------------------------- ranks

    def _slow_rank(self, step: int, alarm: Alarm) -> Event:
        rank = alarm.subject[0]
        if not self._takes_speeds:
            text = (
                f"nothing is done about rank {rank}: this scheduler cannot give a rank less work (DynamicScheduler can)"
            )
            return event_of(step, "action", alarm, text)
        return self._tell_speed(rank, step, alarm)

    def _tell_speed(self, rank: int, step: int, alarm: Alarm) -> Event:
        self._speeds[rank], self._worked[rank] = max(SLOWEST, 1 / alarm.slowdown), step
        text = (
            f"rank {rank} is planned with a speed of {self._speeds[rank]:.2f}: plans give it less work where they can"
        )
        return event_of(step, "action", alarm, text)

    def _undo_speed(self, rank: int, step: int, event: Event) -> Event:
        del self._speeds[rank]
        text = f"rank {rank} is planned with its usual speed again"
        return replace(event, step=step, kind="undone", text=text)

    def _follow_ranks(self, record: StepRecord) -> list[Event]:
        """Correct speeds that are off, and give some work to ranks that had none for long."""
        events = []
        for rank in sorted(self._speeds):
            if record.ranks[rank].expected_s > 0:
                self._worked[rank] = record.step
            alarm = self.alarms.active[(rank,)]
            speed = max(SLOWEST, 1 / alarm.slowdown)
            if record.step - self._worked[rank] >= IDLE:
                self._speeds[rank], self._worked[rank] = math.sqrt(self._speeds[rank]), record.step
                text = (
                    f"rank {rank} had no work for {IDLE} steps: it is planned with a speed of {self._speeds[rank]:.2f}"
                )
                events.append(event_of(record.step, "action", alarm, text))
            elif not 1 / SAME < speed / self._speeds[rank] < SAME and self._worked[rank] == record.step:
                events.append(self._tell_speed(rank, record.step, alarm))
        return events

    def _around(self) -> tuple[RingOrders, frozenset[Group]]:
        """Rings that go around all avoided links, and groups that cannot; searched when the links change, not each step."""
        links = frozenset(self._detours.open)
        if links not in self._found:
            kept = self._orders, frozenset[Group]()
            self._found = {links: self._orders.without(links, self._table) if links else kept}
        return self._found[links]

    def _put_in_force(self, before: Fallback) -> None:
        orders, stuck = self._around()
        speeds = self._given
        if self._speeds:
            given = self._given or (1.0,) * self._orders.ranks
            speeds = tuple(speed * self._speeds.get(rank, 1.0) for rank, speed in enumerate(given))
        state = Fallback(orders, frozenset(stuck), speeds)
        self.state = state if state.digest() != before.digest() else before


def subject_of(event: Event) -> Subject:
    """The link or rank that an event is about."""
    return tuple(int(part) for part in event.subject.split()[-1].split("->"))


def _crosses(group: Group, link: Link) -> bool:
    ranks: Collection[int] = range(group[0], group[0] + group[1])
    return link[0] in ranks and link[1] in ranks


def _name(group: Group) -> str:
    return f"{group[0]}-{group[0] + group[1] - 1}"
