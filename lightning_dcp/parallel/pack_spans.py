"""What a rank did while it worked on a pack: stretches of computing, waiting and transfer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from lightning_dcp.parallel.rank_times import PackShare, PackSpan, Span, SpanKind

Floats = NDArray[np.float64]
SHORTEST = 1e-3
"""Shorter stretches of standing still than this share of their pack are counted as computing: no picture shows them."""
_KINDS: tuple[SpanKind, ...] = ("wait", "transfer", "wait", "transfer")


def blocked_spans(hops: Floats, collectives: Floats) -> list[Span]:
    """All stretches of standing still, in order of time.

    Args:
        hops: the moments of :func:`~lightning_dcp.parallel.hop_split.split_hops`.
        collectives: those of :func:`~lightning_dcp.parallel.hop_split.split_collectives`.
    """
    found = [
        (kind, float(a), float(b))
        for moments in (hops, collectives)
        for row in moments
        for kind, a, b in zip(_KINDS, row[:-1], row[1:], strict=False)
        if b > a
    ]
    return sorted(found, key=lambda span: span[1])


def pack_spans(shares: Sequence[PackShare], edges: Floats, blocked: Sequence[Span] | None) -> tuple[PackSpan, ...]:
    """When each pack ran.

    Args:
        shares: this rank's parts of packs.
        edges: start and end of each, ``[packs, 2]``.
        blocked: all stretches of standing still; None: say nothing of what happened inside.
    """
    found = []
    for share, (start, end) in zip(shares, edges.tolist(), strict=True):
        spans = () if blocked is None else tuple(_joined(_filled(blocked, start, end)))
        found.append(PackSpan(share, start, end, spans))
    return tuple(found)


def _filled(blocked: Sequence[Span], start: float, end: float) -> Iterator[Span]:
    """The stretches of standing still inside, with computing between them."""
    shortest, at = SHORTEST * (end - start), start
    for kind, a, b in blocked:
        if a >= start and b <= end and b - a > shortest:
            yield "compute", at, a
            yield kind, a, b
            at = b
    yield "compute", at, end


def _joined(spans: Iterator[Span]) -> Iterator[Span]:
    """Neighbours of one kind as one, and nothing of no length."""
    last: Span | None = None
    for kind, a, b in spans:
        if b <= a:
            continue
        if last is not None and last[0] == kind and last[2] == a:
            last = kind, last[1], b
            continue
        if last is not None:
            yield last
        last = kind, a, b
    if last is not None:
        yield last
