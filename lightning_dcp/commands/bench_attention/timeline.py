"""When the ranks of a group would end, from how long each computes between what it sends and receives."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from lightning_dcp.parallel.links import Link

Key = tuple[int, int]
"""A hop: its tag, and its number among those of the tag."""


class HopStart(NamedTuple):
    """A rank begins to send to the next one, and computes on. Seconds that it had computed by then, bytes."""

    busy_s: float
    key: Key
    sent_bytes: int


class HopWait(NamedTuple):
    """A rank needs what the previous one has sent, and its own message gone."""

    busy_s: float
    key: Key


class Collective(NamedTuple):
    """A rank takes part in a collective, and waits for its end. Bytes that it sends to all others together."""

    busy_s: float
    sent_bytes: int


Event = HopStart | HopWait | Collective


class RankRecord(NamedTuple):
    """What a rank did.

    Attributes:
        events: in their order.
        busy_s: seconds that it computed in all.
    """

    events: Sequence[Event]
    busy_s: float


def end_times(records: Sequence[RankRecord], link: Link, starts: Sequence[float] | None = None) -> list[float]:
    """When each rank ends, in seconds, if every rank had a device and a link each way of its own.

    A hop arrives after the link's latency and its bytes over the bandwidth, and hides behind compute up to the wait for
    it; a link carries a rank's hops one after another. A collective begins when the last rank has come to it, and takes
    the latency and the most bytes that any rank sends over the bandwidth.

    Args:
        records: of all ranks.
        link: from each rank to its neighbours.
        starts: when each rank begins; 0 by default.
    """
    timeline = _Timeline(len(records), link, starts or [0.0] * len(records))
    left = {rank: list(record.events) for rank, record in enumerate(records)}
    while any(left.values()):
        count = sum(map(len, left.values()))
        for rank, events in left.items():
            while events and timeline.take(rank, events[0]):
                events.pop(0)
        if sum(map(len, left.values())) == count:
            raise RuntimeError("a rank waits for what no other rank sends")
    return [timeline.own(rank, record.busy_s) for rank, record in enumerate(records)]


class _Timeline:
    """The clocks of all ranks."""

    def __init__(self, size: int, link: Link, starts: Sequence[float]) -> None:
        self._size, self._link = size, link
        self._waited = list(starts)  # a rank's clock is what it has waited and what it has computed
        self._link_free = [0.0] * size
        self._sent: dict[tuple[int, Key], float] = {}
        self._arrives: dict[tuple[int, Key], float] = {}
        self._collectives = [0] * size
        self._came: defaultdict[int, dict[int, tuple[float, int]]] = defaultdict(dict)

    def own(self, rank: int, busy_s: float) -> float:
        """A rank's clock after so much computing."""
        return self._waited[rank] + busy_s

    def take(self, rank: int, event: Event) -> bool:
        """Move a rank past an event; False if another rank must come first."""
        now = self.own(rank, event.busy_s)
        if isinstance(event, HopStart):
            self._send(rank, event, now)
            return True
        if isinstance(event, HopWait):
            arrives = self._arrives.get(((rank - 1) % self._size, event.key))
            if arrives is None:
                return False
            end = max(now, arrives, self._sent[rank, event.key])
        else:
            number = self._collectives[rank]
            came = self._came[number]
            came[rank] = now, event.sent_bytes
            if len(came) < self._size:
                return False
            self._collectives[rank] += 1
            end = max(time for time, _ in came.values()) + self._link.seconds(max(sent for _, sent in came.values()))
        self._waited[rank] += end - now
        return True

    def _send(self, rank: int, event: HopStart, now: float) -> None:
        begin = max(now, self._link_free[rank])
        gone = begin + event.sent_bytes / self._link.bandwidth
        self._link_free[rank] = self._sent[rank, event.key] = gone
        self._arrives[rank, event.key] = gone + (self._link.latency_s if event.sent_bytes else 0.0)
