"""How far the clocks of machines are apart, so that times of different ranks can be compared."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_TAG = 78
_ROUND_TRIPS = 20
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def clock_name() -> str:
    """The same for all processes whose ``time.perf_counter`` is the same: those of one running kernel."""
    try:
        return _BOOT.read_text().strip()
    except OSError:  # no Linux
        return socket.gethostname()


def clock_offset(control: dist.ProcessGroup, ranks: Sequence[int]) -> tuple[float, bool]:
    """Seconds to add to this rank's ``time.perf_counter`` to get the first rank's, and whether there are several clocks.

    Exactly 0 on the first rank's own machine. One rank of each other machine swaps messages with the first rank; in the
    quickest of the round trips, the first rank's time is taken to be read half way (Cristian, Distributed Computing 3,
    1989). Collective over the group.

    Args:
        control: a gloo group.
        ranks: its ranks in the world, in its order.
    """
    names: list[Any] = [None] * len(ranks)
    dist.all_gather_object(names, clock_name(), group=control)
    own, offset = dist.get_rank(), 0.0
    others = {name: ranks[names.index(name)] for name in dict.fromkeys(names) if name != names[0]}
    for asker in others.values():
        if own == asker:
            offset = _ask(control, ranks[0])
        elif own == ranks[0]:
            _answer(control, asker)
    found: list[Any] = [None] * len(ranks)
    if others:
        dist.all_gather_object(found, offset, group=control)
        offset = float(found[names.index(names[list(ranks).index(own)])])
    return offset, bool(others)


def _ask(control: dist.ProcessGroup, first: int) -> float:
    found = []
    for _ in range(_ROUND_TRIPS):
        answer = torch.zeros(1, dtype=torch.float64)
        sent = time.perf_counter()
        dist.send(answer, first, group=control, tag=_TAG)
        dist.recv(answer, first, group=control, tag=_TAG)
        back = time.perf_counter()
        found.append((back - sent, float(answer) - (sent + back) / 2))
    return min(found)[1]


def _answer(control: dist.ProcessGroup, asker: int) -> None:
    for _ in range(_ROUND_TRIPS):
        message = torch.zeros(1, dtype=torch.float64)
        dist.recv(message, asker, group=control, tag=_TAG)
        message.fill_(time.perf_counter())
        dist.send(message, asker, group=control, tag=_TAG)
