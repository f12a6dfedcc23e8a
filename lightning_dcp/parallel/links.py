"""How fast the ranks of a CP group reach each other: measured at set-up, in a fraction of a second."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from lightning_dcp.parallel.clock import WaitClock
from lightning_dcp.parallel.exchange import Exchange, GroupExchange
from lightning_dcp.parallel.groups import ParallelGroups

SMALL, LARGE = 64, 1 << 22
"""Bytes of the messages that links are measured with."""

_REPEATS = 7
_TAG = 2  # no other transfers are under way when links are measured


@dataclass(frozen=True)
class Link:
    """One hop of a ring.

    Attributes:
        latency_s: seconds of a hop that carries next to nothing.
        bandwidth: bytes/s that a large hop carries, each way.
    """

    latency_s: float
    bandwidth: float

    def seconds(self, size: float) -> float:
        """Seconds of a hop with so many bytes."""
        return self.latency_s + size / self.bandwidth


def measure_links(groups: ParallelGroups, device: torch.device) -> dict[int, Link]:
    """The slowest hop in the plane's groups of each size above 1; the same on all ranks. Collective over the plane.

    All groups of a size are measured at the same time, as they work. Figures are rounded to powers of two: what is
    decided by them is the same in most runs on one machine.
    """
    sizes = [size for size in sorted(groups.cp_groups) if size > 1]
    measured = torch.zeros(len(sizes), 2, dtype=torch.float64)
    for i, size in enumerate(sizes):
        group = groups.cp_groups[size]
        exchange = GroupExchange(group, group.global_ranks.index(dist.get_rank()), WaitClock())
        measured[i] = torch.tensor(hop_seconds(exchange, device))
    if sizes:
        dist.all_reduce(measured, dist.ReduceOp.MAX, group=groups.control)
    return {size: as_link(*seconds) for size, seconds in zip(sizes, measured.tolist(), strict=True)}


def hop_seconds(exchange: Exchange, device: torch.device) -> tuple[float, float]:
    """Seconds of a small and of a large hop of this rank's group, all of whose ranks call this."""
    small, large = (_hop_seconds(exchange, nbytes, device) for nbytes in (SMALL, LARGE))
    return small, large


def as_link(small_s: float, large_s: float) -> Link:
    """What these times say; beside a large message the latency is next to nothing."""
    return Link(rounded(small_s), rounded(LARGE / large_s))


def _hop_seconds(exchange: Exchange, nbytes: int, device: torch.device) -> float:
    message = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    times = []
    for _ in range(_REPEATS + 1):
        start = now(device)
        exchange.start_hop([message], nbytes, tag=_TAG).wait()
        times.append(now(device) - start)
    return min(times[1:])  # the first use of a group is slow, and what disturbs a hop only ever makes it slower


def rounded(value: float) -> float:
    """The power of two next to a positive number."""
    mantissa, exponent = math.frexp(value)
    return math.ldexp(1.0, exponent if mantissa >= math.sqrt(0.5) else exponent - 1)


def now(device: torch.device) -> float:
    """Seconds of this rank's clock when a device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
