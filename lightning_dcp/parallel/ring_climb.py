"""A good ring for a group too large to try all: local search under a limit for the slowest hop, which is lowered."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lightning_dcp.parallel.ring_order import from_place_0

_STARTS = 256  # of a ring of one; fewer for large groups, where each takes longer
_MOVES = 1 << 17  # so many moves of a segment are looked at in one go


def climb(hops: np.ndarray, weights: np.ndarray) -> tuple[int, ...]:
    """A ring whose slowest hop is as fast as can be found, and under that of small weight.

    Nothing is drawn by chance: the same input gives the same ring.

    Args:
        hops: what a hop costs, int64 ``[source, target]``.
        weights: what is added up, int64 ``[source, target]``.

    Returns:
        The places from place 0 on.
    """
    limits = np.unique(hops[~np.eye(len(hops), dtype=bool)])
    low = _least_connecting(limits, hops)
    best = _lightest(_limited(limits[low], hops, weights), [])
    high = int(np.searchsorted(limits, _slowest(best, hops)))
    while low < high:
        middle = (low + high) // 2
        found = _lightest(_limited(limits[middle], hops, weights), [best])
        reached = int(np.searchsorted(limits, _slowest(found, hops)))
        if reached <= middle:
            best, high = found, reached
        else:
            low = middle + 1
    best = _lightest(_limited(limits[high], hops, weights), [best, best[::-1]])
    return from_place_0(best.tolist())


def _lightest(weights: np.ndarray, known: Sequence[np.ndarray]) -> np.ndarray:
    """The lightest ring that comes of improving known ones, and rings of nearest neighbours."""
    size = len(weights)
    starts = max(1, min(size, _STARTS // size))
    rings = [*known, *(_greedy(weights, size * i // starts) for i in range(starts))]
    return min((_improved(ring, weights) for ring in rings), key=lambda ring: _sum(ring, weights))


def _limited(limit: int, hops: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Weights, with more than any ring weighs added to each hop over the limit."""
    return weights + (hops > limit) * (len(hops) * int(weights.max()) + 1)


def _least_connecting(limits: np.ndarray, hops: np.ndarray) -> int:
    """The place of the least limit under which each rank can reach each other one: no ring has a faster slowest hop."""
    low, high = 0, len(limits) - 1
    while low < high:
        middle = (low + high) // 2
        allowed = hops <= limits[middle]
        if _reaches_all(allowed) and _reaches_all(allowed.T):
            high = middle
        else:
            low = middle + 1
    return low


def _reaches_all(allowed: np.ndarray) -> bool:
    """Whether there is a way from place 0 to all others."""
    reached = np.zeros(len(allowed), dtype=bool)
    reached[0] = True
    for _ in range(len(allowed)):
        reached |= allowed[reached].any(axis=0)
    return bool(reached.all())


def _slowest(order: np.ndarray, hops: np.ndarray) -> int:
    return int(hops[order, np.roll(order, -1)].max())


def _sum(order: np.ndarray, weights: np.ndarray) -> int:
    return int(weights[order, np.roll(order, -1)].sum())


def _greedy(weights: np.ndarray, start: int) -> np.ndarray:
    """A ring that goes on to the nearest place not visited yet, of equal ones to the first."""
    order, ahead = [start], np.ones(len(weights), dtype=bool)
    ahead[start] = False
    while ahead.any():
        places = np.flatnonzero(ahead)
        order.append(int(places[weights[order[-1], places].argmin()]))
        ahead[order[-1]] = False
    return np.array(order)


def _improved(order: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """A ring that no turning of a stretch of it and no swapping of two neighbouring stretches makes lighter."""
    while True:
        gains = [_best_turn(order, weights), _best_swap(order, weights)]
        gain, better = min(gains, key=lambda found: found[0])
        if gain >= 0:
            return order
        order = better


def _best_turn(order: np.ndarray, weights: np.ndarray) -> tuple[int, np.ndarray]:
    """The change of weight by turning one stretch round (2-opt with directed weights), and the ring it gives."""
    size = len(order)
    following = np.roll(order, -1)
    forward, backward = weights[order, following], weights[following, order]
    # what turning adds inside a stretch from i to j: the difference of two prefix sums
    inside = np.concatenate([[0], np.cumsum(backward - forward)])[:size]
    before = np.roll(order, 1)
    first, last = np.arange(size)[:, None], np.arange(size)[None, :]
    change = weights[before[first], order[last]] + weights[order[first], following[last]]
    change = change - weights[before, order][:, None] - forward[None, :] + inside[None, :] - inside[:, None]
    possible = (first >= 1) & (last > first)
    change = np.where(possible, change, 0)
    i, j = np.unravel_index(int(change.argmin()), change.shape)
    return int(change[i, j]), np.concatenate([order[:i], order[i : j + 1][::-1], order[j + 1 :]])


def _best_swap(order: np.ndarray, weights: np.ndarray) -> tuple[int, np.ndarray]:
    """The change of weight by swapping two stretches one behind the other (3-opt that turns nothing), and the ring.

    Cut behind positions a, b and c, of which the stretch from a to b is the shortest, and join a to what follows b, c to
    what follows a, b to what follows c.
    """
    size = len(order)
    joined = weights[order[:, None], np.roll(order, -1)[None, :]]
    change = joined - joined.diagonal()[:, None]  # of joining x to what follows y instead of its own
    positions, best = np.arange(size), (0, 0, 1, 2)
    for length in range(1, max(2, min(size // 3, _MOVES // size**2)) + 1):
        ends = (positions + length) % size
        total = change[positions, ends][:, None] + change[ends] + change.T
        gap = (positions[None, :] - positions[:, None]) % size
        total = np.where(gap > length, total, 0)
        first, last = np.unravel_index(int(total.argmin()), total.shape)
        best = min(best, (int(total[first, last]), int(first), int(ends[first]), int(last)))
    return best[0], _swapped(order, *best[1:])


def _swapped(order: np.ndarray, a: int, b: int, c: int) -> np.ndarray:
    rolled = np.roll(order, -(a + 1))  # the stretch that is moved comes first
    first, second = (b - a) % len(order), (c - a) % len(order)
    return np.concatenate([rolled[first:second], rolled[:first], rolled[second:]])
