"""What one rank tells the others of a step: how its time went, as few numbers as will do."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

SpanKind = Literal["compute", "wait", "transfer"]
Span = tuple[SpanKind, float, float]
"""What a rank did, from when to when."""


@dataclass(frozen=True)
class PackShare:
    """One rank's part of a pack.

    Attributes:
        number: of the pack, in the plan's order.
        first_rank: of the pack's group, in the plane.
        cp_size: ranks of the group.
        tokens: that this rank holds.
        dense_tokens: those of dense segments among them.
        sample_ids: of the pack's samples.
        tokens_by_kind: tokens of each kind of segment on this rank.
        sample_tokens: tokens of each of the samples, on all ranks of the group.
    """

    number: int
    first_rank: int
    cp_size: int
    tokens: int
    dense_tokens: int = 0
    sample_ids: tuple[Any, ...] = ()
    tokens_by_kind: dict[str, int] = field(default_factory=dict)
    sample_tokens: tuple[int, ...] = ()


@dataclass(frozen=True)
class PackSpan:
    """When a rank worked on its part of a pack.

    Attributes:
        share: the part.
        start_s: on the clock that all ranks share.
        end_s: as ``start_s``.
        spans: what it did in between, where it was asked for.
    """

    share: PackShare
    start_s: float
    end_s: float
    spans: tuple[Span, ...] = ()


@dataclass(frozen=True)
class LinkSummary:
    """The hops of one step over one directed link, seen from one of its ends.

    Attributes:
        source: place of the sending rank in the plane.
        target: place of the receiving rank.
        hops: messages.
        num_bytes: of all of them.
        transfer_s: seconds that this end was held up after both had posted the hop, over all hops.
        typical_s: the lower quartile of one hop's such seconds.
        fastest_s: the lower quartile of the seconds from when both had posted a hop until this end had it. It can be longer
            than the link takes, as nobody looks at what arrives during compute, but not shorter.
    """

    source: int
    target: int
    hops: int
    num_bytes: int
    transfer_s: float
    typical_s: float
    fastest_s: float


@dataclass(frozen=True)
class RankSummary:
    """One rank's step.

    Attributes:
        place: in the plane.
        start_s: when its step began, on the clock that all ranks share.
        end_s: when the last of its packs was done.
        busy_s: seconds in between in which it did not stand still for others.
        wait_s: seconds that it stood still until the other end of a hop, or the last rank of a collective, was there.
        transfer_s: seconds that it stood still after that.
        memory_bytes: peak of its memory.
        links: hops that came in.
        sent: hops that went out, where the two directions of a hop end together (NCCL) and both ends have to be asked.
        probes: what links that carry nothing took when they were tried at the end of the step before.
        packs: where they were asked for.
        queued_s: of ``busy_s``, seconds in which the host's thread could have gone on but had no core.
    """

    place: int
    start_s: float
    end_s: float
    busy_s: float
    wait_s: float
    transfer_s: float
    memory_bytes: int = 0
    links: tuple[LinkSummary, ...] = ()
    sent: tuple[LinkSummary, ...] = ()
    probes: tuple[LinkSummary, ...] = ()
    packs: tuple[PackSpan, ...] = ()
    queued_s: float = 0.0
