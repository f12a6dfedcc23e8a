"""Ring orders of all groups: told or measured, chosen by density, led around links, and refused."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from lightning_dcp.errors import ConfigurationError, PlanError
from lightning_dcp.parallel.clock import WaitClock
from lightning_dcp.parallel.context import make_context
from lightning_dcp.parallel.exchange import Exchange, GroupExchange
from lightning_dcp.parallel.groups import CPGroup
from lightning_dcp.parallel.link_table import LinkTable, MeasuredOn
from lightning_dcp.parallel.played import PlayedGroup
from lightning_dcp.parallel.ring_order import RingOrder, hop_links, ring_order_problems
from lightning_dcp.parallel.ring_orders import RingOrders
from lightning_dcp.parallel.ring_search import best_ring
from lightning_dcp.schedule.plan import divisors
from tests.parallel.support import join_world
from tests.support.ranks import RankPool

ISLANDS = (0, 1, 0, 1, 1, 0, 1, 0)


def table_of(islands: Sequence[object], hosts: Sequence[str] | None = None, slow: float = 8.0) -> LinkTable:
    """Links that are fast inside an island and slow between islands."""
    ranks = range(len(islands))
    latency = tuple(tuple(float(i != j) * 1e-5 for j in ranks) for i in ranks)
    speed = {True: 2.0**33, False: 2.0**33 / slow}
    bandwidth = tuple(tuple(speed[islands[i] == islands[j]] * float(i != j) for j in ranks) for i in ranks)
    where = None if hosts is None else MeasuredOn(tuple((host,) for host in hosts), "gloo", "cpu")
    return LinkTable(latency, bandwidth, where)


def test_by_rank_goes_round_the_ranks() -> None:
    orders = RingOrders.by_rank(6)
    assert orders.is_by_rank
    assert {block: orders.for_group(*block) for block in orders.groups} == {
        (first, size): tuple(range(size)) for size in (1, 2, 3, 6) for first in range(0, 6, size)
    }
    assert orders.for_group(3, 3, densities=[1, 9, 1]) == (0, 1, 2)
    assert orders.hops(3, 3) == ((3, 4), (4, 5), (5, 3)) and orders.hops(2, 1) == ()


def test_a_group_takes_its_ranks_out_of_an_explicit_order() -> None:
    orders = RingOrders.explicit([5, 2, 0, 4, 3, 1])
    assert not orders.is_by_rank
    assert orders.for_group(0, 6) == (0, 4, 3, 1, 5, 2)
    assert orders.for_group(0, 3) == (0, 1, 2) and orders.for_group(3, 3) == (0, 2, 1)  # 2 0 1; 5 4 3
    assert orders.hops(3, 3) == ((3, 5), (5, 4), (4, 3))


def test_measured_orders_cross_between_islands_twice_in_every_group() -> None:
    orders = RingOrders.measured(table_of(ISLANDS))
    assert set(orders.groups) == {(first, size) for size in divisors(8) for first in range(0, 8, size)}
    for first, size in orders.groups:
        there = {ISLANDS[place] for place in range(first, first + size)}
        crossed = sum(ISLANDS[a] != ISLANDS[b] for a, b in orders.hops(first, size))
        assert crossed == (2 if len(there) == 2 else 0)


def test_measured_orders_stay_inside_hosts_where_links_do_not_tell() -> None:
    hosts = [f"host {island}" for island in ISLANDS]
    orders = RingOrders.measured(table_of([0] * 8, hosts))
    assert sum(hosts[a] != hosts[b] for a, b in orders.hops(0, 8)) == 2


def test_what_a_hop_carries_decides_between_latency_and_bandwidth() -> None:
    """The slow link of small messages is 0 -> 1, that of large ones 0 -> 2."""
    rows = [[1e-5 * float(i != j) for j in range(3)] for i in range(3)]
    speeds = [[1e9 * float(i != j) for j in range(3)] for i in range(3)]
    rows[0][1], speeds[0][2] = 1e-3, 1e8
    table = LinkTable(tuple(map(tuple, rows)), tuple(map(tuple, speeds)))
    assert RingOrders.measured(table, num_bytes=1000).for_group(0, 3) == (0, 2, 1)
    assert RingOrders.measured(table, num_bytes=10**7).for_group(0, 3) == (0, 1, 2)


def travelled(order: Sequence[int], cost: Sequence[Sequence[float]], densities: Sequence[float]) -> float:
    """Density times seconds of all hops of all shares, by letting them travel."""
    total, at = 0.0, {place: place for place in order}
    for _ in range(len(order) - 1):
        for owner, place in at.items():
            following = order[(order.index(place) + 1) % len(order)]
            total += densities[owner] * cost[place][following]
            at[owner] = following
    return total


def test_dense_shares_take_the_fastest_links_among_orders_of_equal_cost() -> None:
    draw = random.Random(2)
    for size in (3, 5, 6, 12):
        half = [[draw.choice((1.0, 2.0, 8.0)) for _ in range(size)] for _ in range(size)]
        cost = [[half[min(i, j)][max(i, j)] for j in range(size)] for i in range(size)]
        ring = best_ring(cost)
        for _ in range(10):
            densities = [draw.randint(0, 20) / 16 for _ in range(size)]
            times = [travelled(order, cost, densities) for order in ring.orders]
            chosen = travelled(ring.choose(densities), cost, densities)
            assert chosen <= min(times) * (1 + 1e-5)  # densities are compared in whole steps
        assert ring.choose([0.0] * size) == ring.choose([1.0] * size) == ring.orders[0]


def test_the_densest_share_of_each_island_lies_behind_the_slow_link() -> None:
    orders = RingOrders.measured(table_of(ISLANDS))
    for dense_0, dense_1 in ((0, 3), (5, 4), (7, 6)):
        densities = [100.0 if place in (dense_0, dense_1) else 1.0 for place in range(8)]
        into = {target for source, target in orders.hops(0, 8, densities) if ISLANDS[source] != ISLANDS[target]}
        assert into == {dense_0, dense_1}


@pytest.mark.parametrize("densities", [[1.0], [1.0] * 9, [1.0] * 7 + [-1.0], [1.0] * 7 + [math.nan]])
def test_densities_that_are_not_one_for_each_place_are_refused(densities: list[float]) -> None:
    with pytest.raises(PlanError, match="densities of the shares of 8 ranks"):
        RingOrders.measured(table_of(ISLANDS)).for_group(0, 8, densities)


def test_a_group_that_is_none_is_refused() -> None:
    with pytest.raises(PlanError, match=r"no CP group of ranks 1\.\.2"):
        RingOrders.by_rank(4).for_group(1, 2)


ORDERS = {
    "by rank": RingOrders.by_rank(8),
    "explicit": RingOrders.explicit([3, 1, 2, 0, 7, 4, 6, 5]),
    "measured": RingOrders.measured(table_of(ISLANDS)),
}


@pytest.mark.parametrize("name", ORDERS)
def test_a_link_is_avoided_by_every_group_that_has_another_way(name: str) -> None:
    orders = ORDERS[name]
    for link in ((2, 3), (3, 2), (0, 7), (4, 6)):
        changed, stuck = orders.without({link})
        assert stuck == {(first, 2) for first in range(0, 8, 2) if {first, first + 1} == set(link)}
        for block in orders.groups:
            assert sorted(changed.for_group(*block)) == list(range(block[1]))
            if block in stuck or link not in orders.hops(*block):
                assert changed.for_group(*block) == orders.for_group(*block)
            if block not in stuck:
                assert link not in changed.hops(*block)
                assert link not in changed.hops(*block, densities=[*range(block[1])])


def test_the_other_direction_is_tried_first_where_nothing_is_known_of_links() -> None:
    changed, stuck = RingOrders.by_rank(4).without({(2, 3)})
    assert changed.for_group(0, 4) == (0, 3, 2, 1) and changed.for_group(0, 2) == (0, 1)
    assert stuck == {(2, 2)}
    both, stuck = RingOrders.by_rank(4).without({(2, 3), (3, 2)})
    assert {(2, 3), (3, 2)}.isdisjoint(both.hops(0, 4)) and stuck == {(2, 2)}


def test_links_that_no_order_of_a_group_avoids_leave_its_order_as_it_is() -> None:
    orders = RingOrders.explicit([0, 2, 1, 3])
    changed, stuck = orders.without({(source, 1) for source in (0, 2, 3)})
    assert stuck == {(0, 2), (0, 4)}
    assert changed.for_group(0, 4) == (0, 2, 1, 3)


def test_a_measured_order_without_a_link_is_the_best_of_the_others() -> None:
    orders = RingOrders.measured(table_of(ISLANDS))
    across = {(i, j) for i in range(8) for j in range(8) if ISLANDS[i] != ISLANDS[j]}
    changed, _ = orders.without({(0, 1), (1, 0), *(link for link in across if 2 in link)})
    assert sum(link in across for link in changed.hops(0, 8)) == 2


def test_digests_tell_orders_apart_and_fit_a_tensor() -> None:
    digests = [orders.digest() for orders in ORDERS.values()]
    digests.append(ORDERS["measured"].without({(2, 3)})[0].digest())
    assert len(set(digests)) == 4
    assert torch.tensor(digests).dtype == torch.int64
    assert RingOrders.explicit([3, 1, 2, 0, 7, 4, 6, 5]).digest() == digests[1]
    assert RingOrders.explicit(list(range(8))).digest() == digests[0]


@pytest.mark.parametrize(
    ("ring_order", "found"),
    [
        ("fastest", "no such way"),
        ([0, 1, 2], "missing: 3"),
        ([0, 1, 2, 2], "missing: 3; twice or more: 2"),
        ([0, 1, 2, 3, 4, -1], "not in the plane: -1, 4"),
        ([0, 1, 2, 3.0], "neither a name nor a list"),
        ([0, True, 2, 3], "neither a name nor a list"),
        (None, "neither a name nor a list"),
        (4, "neither a name nor a list"),
    ],
    ids=repr,
)
def test_what_is_no_ring_order_is_a_problem(ring_order: Any, found: str) -> None:
    (problem,) = ring_order_problems(ring_order, 4)
    assert repr(ring_order) in problem.asked and found in problem.found and "0..3" in problem.remedy


@pytest.mark.parametrize("ring_order", ["rank", "measured", [2, 0, 3, 1], (0, 1, 2, 3)], ids=repr)
def test_what_is_a_ring_order_is_no_problem(ring_order: Any) -> None:
    assert ring_order_problems(ring_order, 4) == []


def test_an_explicit_order_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="twice or more: 1"):
        RingOrders.explicit([0, 1, 1])


# --- what the hops do


def previous(exchange: Exchange) -> int:
    own = torch.tensor([exchange.rank])
    return int(exchange.start_hop([own], 1, tag=0).wait()[0])


def expected_previous(ring: Sequence[int]) -> list[int]:
    came = {target: source for source, target in hop_links(ring)}
    return [came[place] for place in range(len(ring))]


@pytest.mark.parametrize("ring", [(0, 2, 1), (3, 1, 0, 2), (4, 2, 0, 3, 1)])
def test_hops_of_a_played_group_follow_its_ring(ring: tuple[int, ...]) -> None:
    assert PlayedGroup(len(ring), ring=ring).run(previous) == expected_previous(ring)


def _previous_on_ranks(ring: tuple[int, ...]) -> int:
    groups = join_world()
    return previous(GroupExchange(groups.cp_group(0, len(ring)), groups.rank, WaitClock(), ring))


def test_hops_on_ranks_follow_the_ring(ranks: RankPool) -> None:
    assert ranks.run(_previous_on_ranks, 4, (2, 0, 1, 3)) == expected_previous((2, 0, 1, 3))


def test_a_ring_that_is_none_is_refused() -> None:
    group = CPGroup(None, (0, 1, 2))
    for ring in ((0, 1), (0, 1, 1), (1, 2, 3)):
        with pytest.raises(PlanError, match="must visit each place of a group of 3 ranks once"):
            make_context(group, 0, (6,), ring=ring)
        with pytest.raises(PlanError, match="once"):
            PlayedGroup(3, ring=ring)


def test_a_context_has_the_ring_of_its_exchange() -> None:
    group = CPGroup(None, (0, 1, 2))
    context = make_context(group, 1, (6,), ring=(0, 2, 1))
    assert context.ring == context.with_padding.ring == (0, 2, 1)
    assert [context.holder(hop) for hop in range(4)] == [1, 2, 0, 1]
    exchange = GroupExchange(group, 1, WaitClock(), (0, 2, 1))
    assert make_context(group, 1, (6,), exchange=exchange, ring=(2, 1, 0)).ring == (0, 2, 1)  # the same ring
    with pytest.raises(PlanError, match="of an exchange with the ring"):
        make_context(group, 1, (6,), exchange=exchange, ring=(0, 1, 2))


def test_an_order_without_costs_is_taken_whatever_the_densities() -> None:
    assert RingOrder(((0, 2, 1), (0, 1, 2))).choose([1, 2, 3]) == (0, 2, 1)
