"""Orders in which a ring visits the ranks of a CP group: what one is, and which of equally good ones a pack takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from lightning_dcp.errors import PlanError, Problem

RING_ORDERS = ("rank", "measured")
"""Ways to an order that have a name; the other one is a list of ranks."""

_DENSITY_STEPS = 1 << 20  # densities are compared in whole steps of the densest one's


@dataclass(frozen=True)
class RingOrder:
    """Orders of one CP group that cost the same.

    Attributes:
        orders: the group's places in the order in which hops visit them, each from place 0 on; the first one is taken where
            nothing else matters.
        costs: what a hop from a place to a place costs, in whole units; empty where that is not known.
    """

    orders: tuple[tuple[int, ...], ...]
    costs: tuple[tuple[int, ...], ...] = ()

    def choose(self, densities: Sequence[float]) -> tuple[int, ...]:
        """The order that sends the densest shares over the fastest links.

        In a ring a rank's share travels every hop but the one that comes to the rank itself. With t(a, b) the time of a
        hop, T that of all hops of the ring and d_r the density of rank r's share, an order costs

            sum over r of d_r * (T - t(the one before r, r)).

        T is the same for all orders here, so the order is taken for which the sum of d_r * t(the one before r, r) is
        largest: the densest shares lie behind the slowest hops. Of equal ones it is the first.

        Args:
            densities: of each place's share, by any measure; at least 0.

        Raises:
            PlanError: not one number for each place, or one that is negative or not finite.
        """
        if len(self.orders) == 1 or not self.costs:
            return self.orders[0]
        spared = self._last_hops @ _in_steps(densities, len(self.costs))
        return self.orders[int(spared.argmax())]

    @cached_property
    def _last_hops(self) -> np.ndarray:
        """What the hop that comes to each place costs, int64 ``[orders, places]``."""
        orders = np.array(self.orders)
        costs = np.empty_like(orders)
        into = np.array(self.costs)[np.roll(orders, 1, axis=1), orders]
        np.put_along_axis(costs, orders, into, axis=1)
        return costs


def _in_steps(densities: Sequence[float], size: int) -> np.ndarray:
    """Densities as whole numbers: sums of these are the same on all machines."""
    values = np.asarray(densities, dtype=np.float64)
    if values.shape != (size,) or not (np.isfinite(values) & (values >= 0)).all():
        raise PlanError(f"densities of the shares of {size} ranks must be so many numbers from 0 on, found {densities}")
    largest = values.max()
    return np.rint(values / (largest or 1.0) * _DENSITY_STEPS).astype(np.int64)


def hop_links(order: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """The links that a ring's hops go over, each ``(source, target)``; none for a group of one."""
    if len(order) == 1:
        return ()
    return tuple(zip(order, [*order[1:], order[0]], strict=True))


def from_place_0(ring: Sequence[int]) -> tuple[int, ...]:
    """The same ring, told from place 0 on."""
    start = list(ring).index(0)
    return (*ring[start:], *ring[:start])


def checked_ring(ring: Sequence[int], size: int) -> tuple[int, ...]:
    """A ring of a group of this size.

    Raises:
        PlanError: it is no permutation of the group's places.
    """
    if sorted(ring) != list(range(size)):
        raise PlanError(f"the ring {tuple(ring)} must visit each place of a group of {size} ranks once")
    return tuple(ring)


def ring_order_problems(ring_order: Any, ranks: int) -> list[Problem]:
    """What is wrong with ``ring_order``, an argument of the strategy.

    Args:
        ring_order: ``rank``, ``measured``, or the ranks of the plane in ring order, of which a group takes its own.
        ranks: of the DPxCP plane.
    """
    remedy = f"use 'rank', 'measured', or a list with each of the plane's ranks 0..{ranks - 1} once"
    asked = f"ring_order={ring_order!r}"
    if isinstance(ring_order, str):
        return [] if ring_order in RING_ORDERS else [Problem(asked, "no such way to order a ring", remedy)]
    if not isinstance(ring_order, Sequence) or not all(type(rank) is int for rank in ring_order):
        return [Problem(asked, "neither a name nor a list of whole numbers", remedy)]
    found = _wrong_ranks(ring_order, ranks)
    return [Problem(asked, f"a DPxCP plane of {ranks} rank(s); {found}", remedy)] if found else []


def _wrong_ranks(order: Sequence[int], ranks: int) -> str:
    """Why a list is no permutation of a plane's ranks; empty if it is one."""
    faults = {
        "missing": sorted(set(range(ranks)) - set(order)),
        "twice or more": sorted({rank for rank in order if order.count(rank) > 1}),
        "not in the plane": sorted(set(order) - set(range(ranks))),
    }
    return "; ".join(f"{name}: {', '.join(map(str, wrong))}" for name, wrong in faults.items() if wrong)
