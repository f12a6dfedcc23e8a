"""What was measured of one step, over all ranks: the same on every rank, and a line of the run's record on disk."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

EventKind = Literal["alarm", "cleared", "action", "undone"]
IntervalKind = Literal["compute", "wait", "transfer"]
"""``wait``: until the sender began to send; ``transfer``: from then until all had arrived."""


@dataclass(frozen=True)
class LinkTime:
    """The hops over one directed link in one step, as the receiving rank saw them.

    Attributes:
        source: place of the sending rank in the plane.
        target: place of the receiving rank.
        hops: messages.
        num_bytes: of all of them.
        transfer_s: seconds that the receiver was held up after the sender had begun to send, over all hops.
        typical_s: the lower quartile of one hop's such seconds: what the link takes when nothing else disturbs it.
        expected_s: seconds of one hop of the mean size by the table of links (or the cost model).
    """

    source: int
    target: int
    hops: int
    num_bytes: int
    transfer_s: float
    typical_s: float
    expected_s: float


@dataclass(frozen=True)
class RankTime:
    """How one rank of the plane spent its packs' time in one step.

    Attributes:
        rank: place in the plane.
        busy_s: seconds that it computed.
        wait_s: seconds that it waited for ranks that had not begun to send.
        transfer_s: seconds that it waited for what was on its way, collectives included.
        expected_s: seconds of computing that the plan's cost model predicts for its packs.
        memory_bytes: peak of device memory, or of the process on a CPU.
        expected_parts: of ``expected_s`` what is overhead of packs, what is linear in tokens, what is attention, and what
            densities of segments add to the linear part; empty if nothing was predicted.
        queued_s: of ``busy_s`` the seconds in which it could have gone on but had no core, where the system tells (Linux).
    """

    rank: int
    busy_s: float
    wait_s: float
    transfer_s: float
    expected_s: float
    memory_bytes: int = 0
    expected_parts: tuple[float, ...] = ()
    queued_s: float = 0.0


@dataclass(frozen=True)
class Interval:
    """A stretch of one rank's time in a pack; seconds from the step's start."""

    kind: IntervalKind
    start_s: float
    end_s: float


@dataclass(frozen=True)
class PackTime:
    """One pack on one rank.

    Attributes:
        number: of the pack, in the plan's order.
        rank: place in the plane.
        first_rank: of the pack's group.
        cp_size: ranks of the group.
        start_s: seconds from the step's start.
        end_s: as ``start_s``.
        tokens: that this rank holds.
        dense_tokens: those of dense segments among them.
        sample_ids: of the pack's samples.
        intervals: its time, in order; neighbours of one kind are one.
        tokens_by_kind: tokens of each kind of segment on this rank, where samples have segments.
        sample_tokens: tokens of each of the samples, on all ranks of the group; empty in records that do not tell.
    """

    number: int
    rank: int
    first_rank: int
    cp_size: int
    start_s: float
    end_s: float
    tokens: int
    dense_tokens: int = 0
    sample_ids: tuple[Any, ...] = ()
    intervals: tuple[Interval, ...] = ()
    tokens_by_kind: dict[str, int] = field(default_factory=dict)
    sample_tokens: tuple[int, ...] = ()


@dataclass(frozen=True)
class Event:
    """An alarm, the end of one, or what was done about it.

    Attributes:
        step: at whose end it was decided.
        kind: ``alarm``, ``cleared``, ``action`` or ``undone``.
        subject: ``link 2->3`` or ``rank 1``: places in the plane.
        text: what a reader should know: how slow, since when, what it cost, what was done.
        slowdown: how many times its expected time it takes.
        since_step: the first step of the slow stretch.
        cost_s: seconds of all steps since then that are owed to it.
    """

    step: int
    kind: EventKind
    subject: str
    text: str
    slowdown: float = 1.0
    since_step: int = 0
    cost_s: float = 0.0


@dataclass(frozen=True)
class StepRecord:
    """One step.

    Attributes:
        step: number of the batch in the run, from 0.
        seconds: from the first rank's start of its packs to the last rank's end.
        tokens: of the batch.
        predicted_s: by the plan; None if its scheduler predicts nothing.
        ranks: by place in the plane.
        links: those that carried something, by source and target.
        probes: those that carry nothing and were tried before the step: a few messages between these two ranks alone.
        packs: of all ranks, where they were asked for.
        events: alarms and actions at the step's end.
    """

    step: int
    seconds: float
    tokens: int
    predicted_s: float | None
    ranks: tuple[RankTime, ...]
    links: tuple[LinkTime, ...] = ()
    packs: tuple[PackTime, ...] = ()
    events: tuple[Event, ...] = ()
    probes: tuple[LinkTime, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """JSON-able values; :meth:`from_json` reads them back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> StepRecord:
        """Read what :meth:`to_json` wrote."""
        packs = tuple(
            PackTime(
                **p
                | {
                    "sample_ids": tuple(p["sample_ids"]),
                    "sample_tokens": tuple(p.get("sample_tokens", ())),
                    "intervals": tuple(Interval(**i) for i in p["intervals"]),
                }
            )
            for p in data["packs"]
        )
        return cls(
            data["step"],
            data["seconds"],
            data["tokens"],
            data["predicted_s"],
            tuple(RankTime(**r | {"expected_parts": tuple(r.get("expected_parts", ()))}) for r in data["ranks"]),
            tuple(LinkTime(**value) for value in data["links"]),
            packs,
            tuple(Event(**e) for e in data["events"]),
            tuple(LinkTime(**value) for value in data.get("probes", ())),
        )
