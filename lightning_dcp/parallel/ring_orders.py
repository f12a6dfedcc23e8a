"""The ring orders of all CP groups of a plane: by rank, as a user lists them, or by the measured speed of links."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from lightning_dcp.errors import PlanError, raise_problems
from lightning_dcp.parallel.link_table import LinkTable
from lightning_dcp.parallel.ring_order import RingOrder, from_place_0, hop_links, ring_order_problems
from lightning_dcp.parallel.ring_search import best_ring
from lightning_dcp.schedule.plan import divisors

HOP_BYTES = 1 << 20
"""Of the hops that links are compared by, where nothing is said of them."""

Group = tuple[int, int]
"""First rank and size of an aligned block of the plane."""
LinkPlaces = tuple[int, int]
"""Places in the plane from which and to which a link goes."""


@dataclass(frozen=True)
class RingOrders:
    """In which order the rings of a plane's CP groups visit their ranks; a value that is the same on every rank.

    Attributes:
        ranks: of the plane.
        groups: the orders of each aligned block of ranks.
        table: the links by which they were found; None for orders that are told.
        num_bytes: of the hops that they were found for.
    """

    ranks: int
    groups: dict[Group, RingOrder]
    table: LinkTable | None = None
    num_bytes: int = HOP_BYTES

    @classmethod
    def by_rank(cls, ranks: int) -> RingOrders:
        """Each ring in the order of the ranks.

        Args:
            ranks: of the plane.
        """
        return cls(ranks, {(first, size): RingOrder((tuple(range(size)),)) for first, size in _blocks(ranks)})

    @classmethod
    def explicit(cls, order: Sequence[int]) -> RingOrders:
        """Each group's ranks in the order that they have in a list of all ranks of the plane.

        Args:
            order: the plane's ranks, each once.

        Raises:
            ConfigurationError: it is something else.
        """
        raise_problems(ring_order_problems(order, len(order)))
        return cls(len(order), {block: RingOrder((_members(order, *block),)) for block in _blocks(len(order))})

    @classmethod
    def measured(cls, table: LinkTable, num_bytes: int = HOP_BYTES) -> RingOrders:
        """For each group the order whose slowest hop is fastest, then the one with the fewest hops between nodes.

        See :func:`~lightning_dcp.parallel.ring_search.best_ring`. Nothing is communicated: all ranks hold the same table.

        Args:
            table: links between the plane's ranks.
            num_bytes: of a hop.
        """
        groups = {block: _searched(table, block, num_bytes, ()) for block in _blocks(table.ranks)}
        return cls(table.ranks, groups, table, num_bytes)

    def for_group(self, first_rank: int, size: int, densities: Sequence[float] | None = None) -> tuple[int, ...]:
        """The ring of a group: its places, 0 to ``size - 1``, in the order in which hops visit them.

        Args:
            first_rank: of the group, in the plane.
            size: of the group.
            densities: of what each place of the group holds. Of orders that cost the same the one is taken that sends the
                densest shares over the fastest links; without densities, the first.

        Raises:
            PlanError: no such group, or densities that are not one for each place.
        """
        order = self._of(first_rank, size)
        return order.orders[0] if densities is None else order.choose(densities)

    def shortest_way(self, first_rank: int, size: int) -> tuple[int, ...]:
        """The places of a group, first that whose keys are spared the slowest hop of its ring; none if hops are alike.

        A rank's keys travel every hop but the one that comes to the rank itself.
        """
        order = self._of(first_rank, size)
        into = {target: order.costs[source][target] for source, target in hop_links(order.orders[0]) if order.costs}
        return tuple(sorted(into, key=lambda place: (-into[place], place))) if len(set(into.values())) > 1 else ()

    def hops(self, first_rank: int, size: int, densities: Sequence[float] | None = None) -> tuple[LinkPlaces, ...]:
        """The links that the hops of a group's ring go over, by places in the plane; arguments as for :meth:`for_group`."""
        links = hop_links(self.for_group(first_rank, size, densities))
        return tuple((first_rank + source, first_rank + target) for source, target in links)

    def without(
        self, links: Collection[LinkPlaces], table: LinkTable | None = None
    ) -> tuple[RingOrders, frozenset[Group]]:
        """Orders whose rings send nothing over some links, wherever that can be; the others stay as they are.

        A group takes those of its orders that are free of the links; if there are none and nothing is known of links, the
        other direction of its order, between the same neighbours; at last the best order of all that are free. Ask the
        orders from before any change, with all links that are to be avoided.

        Args:
            links: source and target, by places in the plane.
            table: what is known of links, by default what the orders were found by.

        Returns:
            The orders, and the groups that cannot avoid the links: their orders are kept.
        """
        known = table or self.table
        groups = {block: _avoiding(order, block, links, known, self.num_bytes) for block, order in self.groups.items()}
        kept = {block: self.groups[block] if found is None else found for block, found in groups.items()}
        return replace(self, groups=kept), frozenset(block for block, found in groups.items() if found is None)

    @property
    def is_by_rank(self) -> bool:
        """Whether every ring goes in the order of the ranks."""
        return all(order.orders == (tuple(range(size)),) for (_, size), order in self.groups.items())

    def digest(self) -> int:
        """A 63-bit checksum, the same on all machines, to compare ranks with."""
        return self._digest

    @cached_property
    def _digest(self) -> int:
        text = repr([(block, order.orders, order.costs) for block, order in sorted(self.groups.items())])
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1

    def _of(self, first_rank: int, size: int) -> RingOrder:
        order = self.groups.get((first_rank, size))
        if order is None:
            raise PlanError(
                f"a plane of {self.ranks} ranks has no CP group of ranks {first_rank}..{first_rank + size - 1}"
            )
        return order


def _blocks(ranks: int) -> list[Group]:
    """All groups of a plane."""
    return [(first, size) for size in divisors(ranks) for first in range(0, ranks, size)]


def _members(order: Sequence[int], first_rank: int, size: int) -> tuple[int, ...]:
    """A group's places in the order that its ranks have in the plane's, from place 0 on."""
    return from_place_0([rank - first_rank for rank in order if first_rank <= rank < first_rank + size])


def _searched(table: LinkTable | None, block: Group, num_bytes: int, links: Collection[LinkPlaces]) -> RingOrder:
    """The best orders of a group that go over none of some links if that can be; without a table all others are alike."""
    places = range(block[0], sum(block))

    def seconds(source: int, target: int) -> float:
        if (source, target) in links:
            return math.inf
        return 1.0 if table is None else table.seconds(source, target, num_bytes)

    nodes = None if table is None else table.nodes
    return best_ring(
        [[seconds(source, target) for target in places] for source in places],
        None if nodes is None else [nodes[place] for place in places],
    )


def _avoiding(
    order: RingOrder, block: Group, links: Collection[LinkPlaces], table: LinkTable | None, num_bytes: int
) -> RingOrder | None:
    """Orders of a group that go over none of some links; None if there are none."""
    first, _ = block
    banned = {(source - first, target - first) for source, target in links}

    def free(ring: Sequence[int]) -> bool:
        return banned.isdisjoint(hop_links(ring))

    as_good = tuple(ring for ring in order.orders if free(ring))
    if as_good:
        return replace(order, orders=as_good)
    backward = from_place_0(order.orders[0][::-1])
    if table is None and free(backward):
        return RingOrder((backward,))
    found = _searched(table, block, num_bytes, links)
    return found if free(found.orders[0]) else None
