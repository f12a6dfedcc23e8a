"""The best order of a ring: against all orders of small groups, and on topologies whose best order is known."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from itertools import permutations

import numpy as np
import pytest

from lightning_dcp.errors import PlanError
from lightning_dcp.parallel.ring_climb import climb
from lightning_dcp.parallel.ring_order import hop_links
from lightning_dcp.parallel.ring_search import EXACT_UP_TO, best_ring, ring_seconds

Cost = list[list[float]]

INTERLEAVINGS = {
    "one after the other": (0, 0, 0, 0, 1, 1, 1, 1),
    "every other": (0, 1, 0, 1, 0, 1, 0, 1),
    "pairs": (0, 0, 1, 1, 0, 0, 1, 1),
    "mixed": (0, 1, 1, 0, 1, 0, 0, 1),
    "unequal": (1, 0, 1, 1, 0, 1, 1, 1),
}


def costs(size: int, hop: Callable[[int, int], float]) -> Cost:
    return [[0.0 if i == j else hop(i, j) for j in range(size)] for i in range(size)]


def random_costs(size: int, draw: random.Random, values: Sequence[float] = (1, 2, 3, 4, 5, 6)) -> Cost:
    return costs(size, lambda i, j: draw.choice(values))


def crossings(order: Sequence[int], nodes: Sequence[object]) -> int:
    return sum(nodes[a] != nodes[b] for a, b in hop_links(order))


def all_best(cost: Cost, nodes: Sequence[int]) -> list[tuple[int, ...]]:
    """All orders that are best, by looking at every one."""
    orders = [(0, *rest) for rest in permutations(range(1, len(cost)))]
    keys = [(slowest, crossings(o, nodes), total) for o in orders for slowest, total in [ring_seconds(o, cost)]]
    return [order for order, key in zip(orders, keys, strict=True) if key == min(keys)]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6, 7])
def test_small_groups_get_the_best_of_all_orders_and_all_that_are_as_good(size: int) -> None:
    draw = random.Random(size)
    for _ in range(15):
        cost, nodes = random_costs(size, draw), [draw.randint(0, 1) for _ in range(size)]
        assert list(best_ring(cost, nodes).orders) == all_best(cost, nodes)


def test_the_largest_exact_group_beats_or_equals_every_local_search() -> None:
    draw = random.Random(9)
    for _ in range(4):
        cost = costs(EXACT_UP_TO, lambda i, j: draw.random())
        whole = np.rint(np.array(cost) * 2**24).astype(np.int64)
        slowest, total = ring_seconds(best_ring(cost).orders[0], cost)
        found_slowest, found_total = ring_seconds(climb(whole, whole), cost)
        assert slowest <= found_slowest and (slowest < found_slowest or total <= found_total + 1e-6)


@pytest.mark.parametrize("directed", [False, True])
@pytest.mark.parametrize("name", INTERLEAVINGS)
def test_two_fast_islands_are_crossed_exactly_twice(name: str, directed: bool) -> None:
    islands = INTERLEAVINGS[name]

    def hop(i: int, j: int) -> float:
        seconds = 1e-4 if islands[i] == islands[j] else 2e-3
        return seconds * (1.5 if directed and i > j else 1.0)

    rings = best_ring(costs(8, hop)).orders
    assert all(crossings(order, islands) == 2 for order in rings)
    assert len(rings) >= (1 if directed else 2) and len(set(rings)) == len(rings)


def test_the_slowest_hop_matters_more_than_the_sum() -> None:
    cost = costs(4, lambda i, j: 9.0 if 1 in (i, j) else 1.0)
    cost[0][1], cost[1][2] = 10.0, 1.0  # the least sum goes over the slowest hop
    order = best_ring(cost).orders[0]
    assert (0, 1) not in hop_links(order) and ring_seconds(order, cost)[0] == 9.0


def test_hops_between_nodes_matter_less_than_the_slowest_hop_and_more_than_the_sum() -> None:
    nodes = "aabb"
    cost = costs(4, lambda i, j: 3.0 if nodes[i] == nodes[j] else 1.0)
    assert crossings(best_ring(cost, nodes).orders[0], nodes) == 4
    cost[3] = [3.0, 3.0, 3.0, 0.0]  # now no order is without a hop of 3 s
    assert crossings(best_ring(cost).orders[0], nodes) == 4
    assert crossings(best_ring(cost, nodes).orders[0], nodes) == 2


def test_forbidden_links_are_avoided_where_that_can_be() -> None:
    for size in (3, 5, 8, 12, 20):
        cost = costs(size, lambda i, j: 1.0)
        for i in range(size):
            cost[i][(i + 1) % size] = math.inf
        order = best_ring(cost).orders[0]
        assert math.isfinite(ring_seconds(order, cost)[0])
    only = costs(4, lambda i, j: math.inf if j == 2 else 1.0)  # nothing may come to place 2
    assert math.isinf(ring_seconds(best_ring(only).orders[0], only)[0])


@pytest.mark.parametrize("size", [3, 8, 12])
def test_where_links_are_the_same_both_ways_both_directions_are_there(size: int) -> None:
    draw = random.Random(1)
    half = random_costs(size, draw)
    rings = best_ring([[half[min(i, j)][max(i, j)] for j in range(size)] for i in range(size)]).orders
    assert {(0, *order[:0:-1]) for order in rings} == set(rings)


@pytest.mark.parametrize("size", [16, 64])
def test_nodes_of_large_groups_are_entered_and_left_once(size: int) -> None:
    draw = random.Random(size)
    nodes = [place % (size // 8) for place in range(size)]
    draw.shuffle(nodes)
    cost = costs(size, lambda i, j: draw.choice((1.0, 2.0)) * (1.0 if nodes[i] == nodes[j] else 8.0))
    start = time.perf_counter()
    found = best_ring(cost, nodes)
    assert time.perf_counter() - start < 5  # 0.1 s on an idle machine
    assert sorted(found.orders[0]) == list(range(size)) and found.orders[0][0] == 0
    assert crossings(found.orders[0], nodes) == size // 8
    assert ring_seconds(found.orders[0], cost)[0] == 8.0
    keys = {ring_seconds(order, cost) for order in found.orders}
    assert len(keys) == 1 and found == best_ring(cost, nodes)


def test_a_planted_ring_of_a_large_group_is_found() -> None:
    planted = list(range(24))
    random.Random(3).shuffle(planted)
    fast = {(planted[i - 1], planted[i]) for i in range(24)}
    draw = random.Random(4)
    cost = costs(24, lambda i, j: 1.0 if (i, j) in fast else draw.choice((2.0, 4.0, 8.0)))
    assert set(hop_links(best_ring(cost).orders[0])) == fast


@pytest.mark.parametrize(
    "cost",
    [[], [[0.0, 1.0]], [[0.0, 1.0], [1.0]], [[0.0, -1.0], [1.0, 0.0]], [[0.0, math.nan], [1.0, 0.0]]],
    ids=["empty", "no square", "rows of two lengths", "negative", "not a number"],
)
def test_costs_that_are_none_are_refused(cost: Cost) -> None:
    with pytest.raises(PlanError, match="costs of hops"):
        best_ring(cost)


def test_nodes_of_other_ranks_are_refused() -> None:
    with pytest.raises(PlanError, match="3 nodes for a group of 2 ranks"):
        best_ring([[0.0, 1.0], [1.0, 0.0]], [0, 0, 1])
