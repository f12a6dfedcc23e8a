"""The best order of a ring for what its hops cost: exact for small groups, a local search for large ones.

Finding it is the travelling salesman's problem with directed distances, and with the longest hop weighing most (the
bottleneck version), since all hops of a ring go at the same time and the slowest one holds up all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from itertools import islice

import numpy as np

from lightning_dcp.errors import PlanError
from lightning_dcp.parallel.ring_climb import climb
from lightning_dcp.parallel.ring_order import RingOrder, from_place_0

EXACT_UP_TO = 10
"""Ranks of the largest group whose best order is found for sure."""

MOST_ORDERS = 1024
"""So many orders of equal cost are kept, and the other direction of each."""

_BITS = 24  # of the slowest hop's cost as a whole number: sums of these do not depend on their order
_FORBIDDEN = 1 << (_BITS + 1)
_NEVER = 1 << 55  # above any sum of costs


def best_ring(cost: Sequence[Sequence[float]], nodes: Sequence[Hashable] | None = None) -> RingOrder:
    """The orders whose slowest hop is fastest; of these, those with fewest hops between nodes; of these, of least sum.

    The same input gives the same result on every machine. Costs count as equal if they differ by less than a ten-millionth
    of the slowest. The result's first order is the first one in lexicographic order (of those found, above
    ``EXACT_UP_TO`` ranks).

    Args:
        cost: seconds of a hop, ``[source][target]`` by places in the group; infinite where none must go, which is kept if
            it can be.
        nodes: for each place the node that it is on; by default all are on one.

    Raises:
        PlanError: costs that are no square, or negative, or not a number.
    """
    hops = _whole(cost)
    if len(hops) == 1:
        return RingOrder(((0,),), ((0,),))
    weights = hops + _crossings(nodes, len(hops)) * (len(hops) * _FORBIDDEN + 1)
    found = _exact(hops, weights) if len(hops) <= EXACT_UP_TO else _near(climb(hops, weights), hops, weights)
    return RingOrder(_both_directions(found, hops, weights), tuple(map(tuple, hops.tolist())))


def ring_seconds(order: Sequence[int], cost: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Seconds of the slowest hop of a ring, and of all its hops together."""
    if len(order) == 1:
        return 0.0, 0.0
    hops = [cost[order[i - 1]][order[i]] for i in range(len(order))]
    return max(hops), math.fsum(hops)


def _whole(cost: Sequence[Sequence[float]]) -> np.ndarray:
    """Costs as whole numbers, int64 ``[c, c]``; the unit is a power of two, so that equal sums stay equal."""
    size = len(cost)
    values = np.array(cost, dtype=np.float64) if all(len(row) == size for row in cost) else np.empty(0)
    if not size or values.shape != (size, size):
        raise PlanError("costs of hops must be a square: a row for each source, with a number for each target")
    np.fill_diagonal(values, 0.0)
    if not (values >= 0).all():
        raise PlanError(f"costs of hops must be from 0 on, found {values.min()}")
    finite = np.isfinite(values)
    _, exponent = math.frexp(values[finite].max())
    return np.where(finite, np.rint(np.ldexp(values, _BITS - exponent)), _FORBIDDEN).astype(np.int64)


def _crossings(nodes: Sequence[Hashable] | None, size: int) -> np.ndarray:
    """1 for a hop from node to node, else 0; int64 ``[c, c]``."""
    if nodes is None:
        return np.zeros((size, size), dtype=np.int64)
    if len(nodes) != size:
        raise PlanError(f"{len(nodes)} nodes for a group of {size} ranks: there must be one for each")
    return np.array([[int(a != b) for b in nodes] for a in nodes], dtype=np.int64)


# --- small groups


def _exact(hops: np.ndarray, weights: np.ndarray) -> list[tuple[int, ...]]:
    """The first of all best orders; the slowest hop is found by trying, the least sum under it by Held and Karp."""
    limits = np.unique(hops[~np.eye(len(hops), dtype=bool)])
    low, high = 0, len(limits) - 1
    while low < high:
        middle = (low + high) // 2
        if _ways_home(_within(limits[middle], hops, weights))[0, 0] < _NEVER:
            high = middle
        else:
            low = middle + 1
    allowed = _within(limits[low], hops, weights)
    return list(islice(_rings(allowed, _ways_home(allowed)), MOST_ORDERS))


def _within(limit: int, hops: np.ndarray, weights: np.ndarray) -> np.ndarray:
    return np.where(hops <= limit, weights, _NEVER)


def _ways_home(weights: np.ndarray) -> np.ndarray:
    """The least weight from a place through all places not yet visited to place 0, int64 ``[visited, place]``.

    Visited places are a set of bits, that of place p being ``1 << (p - 1)``; place 0 stands in all of them. Held and Karp
    1962, https://doi.org/10.1137/0110015.
    """
    size = len(weights)
    home = np.full((1 << (size - 1), size), _NEVER)
    home[-1] = weights[:, 0]
    places = np.arange(1, size)
    for visited in range(len(home) - 2, -1, -1):
        ahead = places[(visited >> (places - 1)) & 1 == 0]
        home[visited] = (weights[:, ahead] + home[visited | 1 << (ahead - 1), ahead]).min(axis=1)
    return np.minimum(home, _NEVER)


def _rings(weights: np.ndarray, home: np.ndarray) -> Iterator[tuple[int, ...]]:
    """All rings of the least weight in lexicographic order, without a step aside."""
    rows, ways = weights.tolist(), home.tolist()
    paths: list[tuple[tuple[int, ...], int, int]] = [((0,), 0, ways[0][0])]
    while paths:
        path, visited, left = paths.pop()
        if len(path) == len(rows):
            yield path
            continue
        for place in range(len(rows) - 1, 0, -1):
            bit, step = 1 << (place - 1), rows[path[-1]][place]
            if not visited & bit and step + ways[visited | bit][place] == left:
                paths.append(((*path, place), visited | bit, left - step))


# --- any size


def _near(order: tuple[int, ...], hops: np.ndarray, weights: np.ndarray) -> list[tuple[int, ...]]:
    """An order, and those that are as good with two places swapped, ascending."""
    size = len(order)
    first, second = np.triu_indices(size, 1)
    swapped = np.tile(np.array(order), (len(first), 1))
    rows = np.arange(len(first))
    swapped[rows, first], swapped[rows, second] = swapped[rows, second], swapped[rows, first]
    found = {order, *(from_place_0(ring) for ring in _as_good(swapped, order, hops, weights))}
    return sorted(found)[:MOST_ORDERS]


def _both_directions(
    found: Sequence[tuple[int, ...]], hops: np.ndarray, weights: np.ndarray
) -> tuple[tuple[int, ...], ...]:
    """Orders, and behind them those of their reverses that are as good."""
    backward = np.array([from_place_0(order[::-1]) for order in found])
    return tuple(dict.fromkeys([*found, *map(tuple, _as_good(backward, found[0], hops, weights))]))


def _as_good(orders: np.ndarray, best: Sequence[int], hops: np.ndarray, weights: np.ndarray) -> list[tuple[int, ...]]:
    """Those of some orders ``[n, c]`` whose slowest hop and sum are those of another."""
    rows = np.vstack([orders, best])
    before = np.roll(rows, 1, axis=1)
    slowest, sums = hops[before, rows].max(axis=1), weights[before, rows].sum(axis=1)
    good = (slowest == slowest[-1]) & (sums == sums[-1])
    return [tuple(row) for row in orders[good[:-1]].tolist()]
