"""Measuring the links of a plane: all ranks at once, in rounds of disjoint pairs."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from lightning_dcp.parallel.clock import WaitClock
from lightning_dcp.parallel.exchange import Exchange, GroupExchange
from lightning_dcp.parallel.groups import CPGroup, ParallelGroups
from lightning_dcp.parallel.link_table import LinkTable, MeasuredOn
from lightning_dcp.parallel.links import LARGE, SMALL, Link, as_link, now

_REPEATS = 5
_TAG = 3  # no other transfers are under way between two ranks when their link is measured


def measure_link_table(groups: ParallelGroups, device: torch.device) -> LinkTable:
    """Every link between two ranks of the plane, in both directions. Collective over the world.

    In each of R - 1 rounds every rank measures with another partner, both directions one after the other, by the same hops
    as attention's. Clocks of two machines do not tell how long a message takes, so it is sent there and back: a small
    message's time is half of the way there and back, and a large one's is what is left of the way with a small answer. So
    a link's two directions have one latency, and each its own bandwidth. What disturbs a hop only makes it slower: the
    fastest of a few counts. With several planes (tensor and pipeline parallelism) a link is the slowest of theirs; figures
    are rounded to powers of two.

    Args:
        groups: the process groups.
        device: where messages lie.

    Returns:
        The table, the same on all ranks.
    """
    own = {}
    for partner in _partners(groups.rank, len(groups.plane_ranks)):
        seconds = _pair_seconds(pair_exchange(groups, partner), device)
        lower, higher = sorted((groups.rank, partner))
        if seconds is not None:
            own[lower, higher], own[higher, lower] = seconds
    every: list[dict[tuple[int, int], tuple[float, float]]] = [{} for _ in groups.world_ranks]
    dist.all_gather_object(every, own, group=groups.control)
    return LinkTable.of_links(_slowest(every), len(groups.plane_ranks), where_measured(groups, device))


def where_measured(groups: ParallelGroups, device: torch.device) -> MeasuredOn:
    """What a table of links is valid for. Collective over the world."""
    every: list[tuple[int, str]] = [(0, "")] * len(groups.world_ranks)
    dist.all_gather_object(every, (groups.rank, socket.gethostname()), group=groups.control)
    hosts = [tuple(host for place, host in every if place == own) for own in range(len(groups.plane_ranks))]
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return MeasuredOn(tuple(hosts), str(dist.get_backend(groups.plane)), kind)


def pair_exchange(groups: ParallelGroups, partner: int, clock: WaitClock | None = None) -> GroupExchange:
    """Communication of this rank with another one of the plane, in the plane's process group.

    The lower of the two is place 0. A hop with nothing to send, or of 0 tokens, goes one way only.

    Args:
        groups: the process groups.
        partner: place of the other rank in the plane.
        clock: where waiting is counted.
    """
    places = sorted((groups.rank, partner))
    pair = CPGroup(groups.plane, tuple(groups.plane_ranks[place] for place in places))
    return GroupExchange(pair, places.index(groups.rank), clock or WaitClock())


def _partners(rank: int, ranks: int) -> list[int]:
    """Whom a rank meets, round by round, so that each meets each other one once (a round-robin tournament).

    All but the last stand on a circle that turns by one place a round; those opposite each other meet, and the one without
    an opposite meets the last. With an odd number of ranks there is no last, and one a round meets nobody.
    """
    circle = ranks - 1 + ranks % 2
    met = []
    for turn in range(circle):
        partner = (turn - rank) % circle if rank < circle else turn * (circle + 1) // 2 % circle
        if partner == rank:
            partner = circle
        if partner < ranks:
            met.append(partner)
    return met


def _pair_seconds(exchange: Exchange, device: torch.device) -> tuple[tuple[float, float], tuple[float, float]] | None:
    """Seconds of a small and a large message from place 0 to place 1, and back; None on place 1, which keeps no time."""
    small = _round_trip(exchange, SMALL, SMALL, device)
    there, back = _round_trip(exchange, LARGE, SMALL, device), _round_trip(exchange, SMALL, LARGE, device)
    if exchange.rank:
        return None
    half = small / 2
    return (half, _rest(there, half)), (half, _rest(back, half))


def _rest(both: float, answer: float) -> float:
    """What the large message of a way there and back took; more than nothing, however the two were disturbed."""
    return max(both - answer, both / 2)


def _round_trip(exchange: Exchange, there: int, back: int, device: torch.device) -> float:
    """Seconds until a message from place 0 has its answer, the fastest of a few."""
    out, answer = (torch.zeros(size, dtype=torch.uint8, device=device) for size in (there, back))
    empty = out[:0]
    times = []
    for _ in range(_REPEATS + 1):
        start = now(device)
        if exchange.rank == 0:
            exchange.start_hop([out], 0, tag=_TAG).wait()
            exchange.start_hop([empty], back, tag=_TAG).wait()
        else:
            exchange.start_hop([empty], there, tag=_TAG).wait()
            exchange.start_hop([answer], 0, tag=_TAG).wait()
        times.append(now(device) - start)
    return min(times[1:])  # the first use of a link is slow


def _slowest(
    every: Sequence[Mapping[tuple[int, int], tuple[float, float]]],
) -> dict[tuple[int, int], Link]:
    """The links as all ranks see them: of the planes' links between two places the slowest."""
    found: dict[tuple[int, int], tuple[float, float]] = {}
    for measured in every:
        for places, (small, large) in measured.items():
            before = found.get(places, (0.0, 0.0))
            found[places] = max(small, before[0]), max(large, before[1])
    return {places: as_link(*seconds) for places, seconds in found.items()}
