"""A link that carries nothing is tried: a few messages between its two ranks, while the others go on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from lightning_dcp.parallel.clock import WaitClock
from lightning_dcp.parallel.groups import ParallelGroups
from lightning_dcp.parallel.hop_split import lower_quartile
from lightning_dcp.parallel.link_measure import pair_exchange
from lightning_dcp.parallel.rank_times import LinkSummary
from lightning_dcp.parallel.stamps import stamps_of

_TAG = 3
_MESSAGES = 4


def probe_links(
    groups: ParallelGroups, due: Sequence[tuple[tuple[int, int], int]], device: torch.device
) -> tuple[LinkSummary, ...]:
    """Try links, one after another; what this rank saw as their receiver.

    Only the two ranks of a link take part, and both pass the same list. They talk as hops of attention do.

    Args:
        groups: the process groups.
        due: links as places in the plane, and bytes of a message.
        device: where messages lie.
    """
    found = []
    for (source, target), num_bytes in due:
        if groups.rank == source:
            _send(groups, target, num_bytes, device)
        elif groups.rank == target:
            seconds = _receive(groups, source, num_bytes, device)
            typical, size = lower_quartile(seconds), num_bytes * len(seconds)
            found.append(
                LinkSummary(source, target, len(seconds), size, float(seconds.sum()), typical, max(0.0, typical))
            )
    return tuple(found)


def _send(groups: ParallelGroups, target: int, num_bytes: int, device: torch.device) -> None:
    exchange = pair_exchange(groups, target, WaitClock())
    message = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    hops = [exchange.start_hop([message], 0, tag=_TAG) for _ in range(1 + _MESSAGES)]
    for hop in hops:
        hop.wait()


def _receive(groups: ParallelGroups, source: int, num_bytes: int, device: torch.device) -> np.ndarray:
    """Seconds that each message but the first held this rank up.

    All are sent at once, so that one follows the other; what this rank waits until the sender comes here is in the first.
    """
    exchange, stamps = pair_exchange(groups, source, WaitClock()), stamps_of(device)
    nothing = torch.zeros(0, dtype=torch.uint8, device=device)
    hops = [exchange.start_hop([nothing], num_bytes, tag=_TAG) for _ in range(1 + _MESSAGES)]
    moments = [stamps.now()]
    for hop in hops:
        hop.wait()
        moments.append(stamps.now())
    return np.diff(stamps.seconds(moments))[1:]
