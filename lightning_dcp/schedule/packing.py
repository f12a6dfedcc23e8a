"""Samples into packs of a token limit."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence


def best_fit(samples: Iterable[int], lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Each sample into the fullest pack that still has room for it, in the order given; O(n log n).

    With the longest sample first it needs at most 11/9 of the fewest packs possible, and usually just those.
    """
    packs: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (free tokens, number of the pack), ascending
    for sample in samples:
        length = lengths[sample]
        at = bisect_left(rooms, (length, -1))
        if at < len(rooms):
            room, number = rooms.pop(at)
        else:
            room, number = capacity, len(packs)
            packs.append([])
        packs[number].append(sample)
        if room > length:
            insort(rooms, (room - length, number))
    return packs
