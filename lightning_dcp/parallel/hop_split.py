"""Hops and collectives of a step in numbers: what was waiting for another rank, and what was the transfer itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_dcp.parallel.rank_times import LinkSummary

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
NOBODY = -1
"""The place of a source or target that a hop does not have, as nothing came in or went out."""


@dataclass(frozen=True)
class HopTable:
    """All hops of one rank in a step, in the order in which they were posted. Seconds are on the common clock.

    Attributes:
        source: places, int ``[hops]``; :data:`NOBODY` where nothing came in.
        target: places, int ``[hops]``; :data:`NOBODY` where nothing went out.
        received: bytes that came in.
        sent: bytes that went out.
        times: ``[hops, 4]``: posted, wait begun, incoming message there, wait ended.
        together: whether both directions end together (NCCL), so that the third time says nothing of its own.
    """

    source: Ints
    target: Ints
    received: Ints
    sent: Ints
    times: Floats
    together: bool = False


@dataclass(frozen=True)
class CollectiveTable:
    """All collectives of one rank in a step.

    Attributes:
        members: places of the group's ranks, for each collective.
        times: ``[collectives, 2]``: begun, ended.
    """

    members: Sequence[tuple[int, ...]]
    times: Floats


def times_for_peers(hops: HopTable, collectives: CollectiveTable, own: int) -> dict[int, Floats]:
    """For each place that this rank had to do with: when hops to it, hops from it and collectives with it were begun.

    n-th means the same on both sides: ranks of a group call the same hops in the same order.
    """
    peers = {int(p) for p in np.union1d(hops.source, hops.target)} | {p for group in collectives.members for p in group}
    posted, begun = hops.times[:, 0], collectives.times[:, 0]
    together = {p: [i for i, group in enumerate(collectives.members) if p in group] for p in peers}
    return {
        p: np.concatenate([posted[hops.target == p], posted[hops.source == p], begun[together[p]]])
        for p in sorted(peers - {own, NOBODY})
    }


def split_hops(hops: HopTable, told: Mapping[int, Floats]) -> Floats:
    """The moments of every hop: wait begun, its sender there, message there, its receiver there, all done.

    Args:
        hops: this rank's.
        told: what peers told, as they made it by :func:`times_for_peers`.

    Returns:
        ``[hops, 5]``, ascending. From the first to the second, and from the third to the fourth, this rank waited for
        others; the rest was transfer.
    """
    sender, receiver = np.full((2, len(hops.source)), -np.inf)
    for place, times in told.items():
        incoming, outgoing = hops.source == place, hops.target == place
        sender[incoming] = times[: incoming.sum()]
        receiver[outgoing] = times[incoming.sum() : incoming.sum() + outgoing.sum()]
    begun, there, done = hops.times[:, 1], hops.times[:, 2], hops.times[:, 3]
    if hops.together:
        both = np.clip(np.maximum(sender, receiver), begun, done)
        return np.stack([begun, both, done, done, done], axis=1)
    there = np.where(hops.source == NOBODY, begun, there)
    return np.stack([begun, np.clip(sender, begun, there), there, np.clip(receiver, there, done), done], axis=1)


def split_collectives(collectives: CollectiveTable, told: Mapping[int, Floats], hops: HopTable) -> Floats:
    """The moments of every collective: begun, the last rank there, ended; ``[collectives, 3]``."""
    last = collectives.times[:, 0].copy()
    for place, times in told.items():
        shared = [i for i, group in enumerate(collectives.members) if place in group]
        before = int((hops.source == place).sum() + (hops.target == place).sum())
        last[shared] = np.maximum(last[shared], times[before:])
    begun, ended = collectives.times[:, 0], collectives.times[:, 1]
    return np.stack([begun, np.minimum(last, ended), ended], axis=1)


def incoming_links(hops: HopTable, moments: Floats, told: Mapping[int, Floats], own: int) -> tuple[LinkSummary, ...]:
    """The links over which something came in."""
    transfer = moments[:, 2] - moments[:, 1]
    found = []
    for place in sorted(set(hops.source.tolist()) - {NOBODY}):
        chosen = hops.source == place
        both = np.maximum(told[place][: chosen.sum()], hops.times[chosen, 0])
        size = int(hops.received[chosen].sum())
        found.append(_summary(place, own, size, transfer[chosen], moments[chosen, 2] - both))
    return tuple(found)


def outgoing_links(hops: HopTable, moments: Floats, told: Mapping[int, Floats], own: int) -> tuple[LinkSummary, ...]:
    """The links over which something went out, where both directions of a hop end together."""
    transfer = moments[:, 2] - moments[:, 1]
    found = []
    for place in sorted(set(hops.target.tolist()) - {NOBODY}):
        chosen, before = hops.target == place, (hops.source == place).sum()
        both = np.maximum(told[place][before : before + chosen.sum()], hops.times[chosen, 0])
        size = int(hops.sent[chosen].sum())
        found.append(_summary(own, place, size, transfer[chosen], moments[chosen, 2] - both))
    return tuple(found)


def _summary(source: int, target: int, num_bytes: int, transfer: Floats, whole: Floats) -> LinkSummary:
    typical, fastest = lower_quartile(transfer), max(0.0, lower_quartile(whole))
    return LinkSummary(source, target, len(transfer), num_bytes, float(transfer.sum()), typical, fastest)


def lower_quartile(values: Floats) -> float:
    """The value that a quarter of them do not exceed: one of them, not a mean."""
    return float(np.partition(values, (len(values) - 1) // 4)[(len(values) - 1) // 4])
