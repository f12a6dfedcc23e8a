"""Faults to be found: a link that delivers late, a rank that computes slowly. Each can be switched on and off at any time.

Both work inside a rank that was forked for a test, with or without a Trainer::

    with slow_link(2, 3, seconds=0.02) as fault:   # on every rank; it acts where something comes in over that link
        trainer.fit(...)                            # fault.on = False ends it, True begins it again

    with slow_rank(1, seconds=0.02) as fault:
        ...
        fault.compute()                             # to be called where the rank computes: once a pack

``fault.between(start, end)`` makes a fault that switches itself by a counter of steps: ``fault.step`` is to be set.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from lightning_dcp.parallel.exchange import Hop


@dataclass
class Fault:
    """Something planted.

    Attributes:
        seconds: of each delay.
        here: whether this rank is the one to be delayed.
        on: whether it acts now.
        step: number of the step under way, where the fault is to follow it.
        first: the first step of the fault, where it follows steps.
        end: the first step after it.
        times: how often it acted.
    """

    seconds: float
    here: bool = True
    on: bool = True
    step: int = 0
    first: int = 0
    end: int | None = None
    times: int = 0

    def between(self, first: int, end: int | None = None) -> Fault:
        """Act from this step on, and before that one."""
        self.first, self.end = first, end
        return self

    def act(self) -> None:
        """Delay this rank, if it is the one and the time has come."""
        if self.here and self.on and self.step >= self.first and (self.end is None or self.step < self.end):
            self.times += 1
            time.sleep(self.seconds)

    compute = act


@contextmanager
def slow_link(source: int, target: int, *, seconds: float) -> Iterator[Fault]:
    """Whatever comes from one rank of the world to another by a hop is there so much later.

    The receiver's wait ends later than it would; computing beside the transfer hides nothing of that.
    """
    fault, receive = Fault(seconds, here=int(os.environ["RANK"]) == target), Hop._receive

    def late(hop: Hop) -> None:
        receive(hop)
        if hop.source == source and hop._received.numel():
            fault.act()

    Hop._receive = late  # type: ignore[method-assign]
    try:
        yield fault
    finally:
        Hop._receive = receive  # type: ignore[method-assign]


@contextmanager
def slow_rank(rank: int, *, seconds: float) -> Iterator[Fault]:
    """A rank of the world takes so much longer wherever ``compute`` of the fault is called."""
    yield Fault(seconds, here=int(os.environ["RANK"]) == rank)
