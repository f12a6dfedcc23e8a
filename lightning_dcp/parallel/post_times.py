"""Ranks tell each other when they posted their hops: what a receiver waited for is known only with the sender's time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

_TAG = 77  # the control group sends nothing else from rank to rank while a step ends
Times = NDArray[np.float64]


def swap_times(control: dist.ProcessGroup, plane_ranks: Sequence[int], times: Mapping[int, Times]) -> dict[int, Times]:
    """Send some of the ranks their times, and receive as many from each.

    Args:
        control: a gloo group over the world.
        plane_ranks: the plane's ranks in the world.
        times: for places in the plane what they get. Each of them calls this, too, with as many times for this rank: both
            count the hops and collectives that they had with each other.

    Returns:
        By place, what came from there.
    """
    received = {place: torch.empty(len(values), dtype=torch.float64) for place, values in times.items()}
    works = [dist.irecv(message, plane_ranks[place], group=control, tag=_TAG) for place, message in received.items()]
    sent = {place: torch.from_numpy(np.ascontiguousarray(values)) for place, values in times.items()}
    works += [dist.isend(message, plane_ranks[place], group=control, tag=_TAG) for place, message in sent.items()]
    for work in works:
        if work is not None:
            work.wait()
    return {place: message.numpy() for place, message in received.items()}
