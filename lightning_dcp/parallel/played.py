"""A CP group played by one process: its ranks take turns, so that one device can do the work of several.

For measuring and testing where there are fewer devices than ranks. Each rank is a thread, and only the one that holds
the baton computes; a rank that needs what another has not sent yet passes the baton on. So each rank's own computing
time can be measured as if it had the device alone, and what it sends can be counted.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_dcp.parallel.exchange import Exchange, Transfer
from lightning_dcp.parallel.groups import CPGroup
from lightning_dcp.parallel.ring_order import checked_ring

T = TypeVar("T")


@dataclass
class PlayedRank:
    """What one rank of a played group did.

    Attributes:
        busy_seconds: it computed for so long.
        messages: bytes of each message that it sent to another rank.
    """

    busy_seconds: float = 0.0
    messages: list[int] = field(default_factory=list)

    @property
    def sent_bytes(self) -> int:
        """Bytes that it sent to other ranks."""
        return sum(self.messages)


class PlayedGroup:
    """A group whose ranks are played by threads of this process.

    Args:
        size: ranks, c.
        device: on which all of them compute; work on a CUDA device is waited for before a rank's clock stops.
        ring: the places in the order in which hops visit them; by default that of the ranks.

    Raises:
        PlanError: a ring that is no permutation of the places.
    """

    def __init__(self, size: int, device: torch.device | str = "cpu", ring: Sequence[int] | None = None) -> None:
        self.size, self.device = size, torch.device(device)
        self.ring = None if ring is None else checked_ring(ring, size)
        self.group = CPGroup(None, tuple(range(size)))
        self.ranks = [PlayedRank() for _ in range(size)]
        self._baton = threading.Condition()
        self._posted: dict[tuple[Any, ...], Tensor] = {}
        self._failed: BaseException | None = None

    def run(self, job: Callable[[Exchange], T]) -> list[T]:
        """Run a job on every rank, with its communication as the argument; what each returned.

        Raises:
            Exception: whatever a rank raised first; the others are ended.
        """
        self._failed = None
        self._posted.clear()
        results: list[Any] = [None] * self.size
        threads = [threading.Thread(target=self._play, args=(rank, job, results)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._failed is not None:
            raise self._failed
        return results

    def _play(self, rank: int, job: Callable[[Exchange], Any], results: list[Any]) -> None:
        with self._baton:
            try:
                if self._failed is None:
                    exchange = _PlayedExchange(self, rank)
                    exchange.start_clock()
                    results[rank] = job(exchange)
                    exchange.stop_clock()
            except BaseException as error:  # handed on to the caller of run()
                self._failed = self._failed or error
            self._baton.notify_all()

    def post(self, key: tuple[Any, ...], message: Tensor) -> None:
        """Leave a message for another rank."""
        self._posted[key] = message
        self._baton.notify_all()

    def take(self, key: tuple[Any, ...]) -> Tensor:
        """A message from another rank, when it is there; a copy, as a rank of its own would have."""
        self._baton.wait_for(lambda: key in self._posted or self._failed is not None)
        if self._failed is not None:
            raise RuntimeError("another rank of the played group has failed")
        return self._posted.pop(key).clone()


class _PlayedExchange(Exchange):
    """One rank's communication in a played group."""

    def __init__(self, played: PlayedGroup, rank: int) -> None:
        self.rank, self.size, self._ring = rank, played.size, played.ring
        self._played, self._record = played, played.ranks[rank]
        self._counts: dict[Any, int] = {}
        self._since = 0.0

    def start_clock(self) -> None:
        self._since = time.perf_counter()

    def stop_clock(self) -> None:
        if self._played.device.type == "cuda":
            torch.cuda.synchronize(self._played.device)
        self._record.busy_seconds += time.perf_counter() - self._since

    def start_hop(self, tensors: Sequence[Tensor], tokens: int, *, tag: int) -> Transfer:
        number = self._next(("hop", tag))
        following, previous = self.neighbours
        self.stop_clock()
        for i, tensor in enumerate(tensors):
            self._post(following, ("hop", tag, number, i), tensor)
        self.start_clock()
        return _PlayedHop(self, [(previous, self.rank, "hop", tag, number, i) for i in range(len(tensors))])

    def all_gather(self, local: Tensor, tokens: Sequence[int]) -> Tensor:
        return torch.cat(self._swap("all_gather", [local] * self.size))

    def reduce_scatter(self, shares: Tensor, tokens: Sequence[int]) -> Tensor:
        parts = self._swap("reduce_scatter", shares.split(list(tokens)))
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return total

    def all_to_all(self, parts: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        received = self._swap("all_to_all", parts)
        return [part.reshape(tuple(shape)) for part, shape in zip(received, shapes, strict=True)]

    def _swap(self, name: str, parts: Sequence[Tensor]) -> list[Tensor]:
        number = self._next(name)
        self.stop_clock()
        for rank in range(self.size):
            if rank != self.rank:
                self._post(rank, (name, number), parts[rank])
        received = [
            parts[rank] if rank == self.rank else self._played.take((rank, self.rank, name, number))
            for rank in range(self.size)
        ]
        self.start_clock()
        return received

    def _post(self, to: int, key: tuple[Any, ...], message: Tensor) -> None:
        if message.numel():
            self._record.messages.append(message.numel() * message.element_size())
        self._played.post((self.rank, to, *key), message)

    def receive(self, keys: Sequence[tuple[Any, ...]]) -> list[Tensor]:
        self.stop_clock()
        received = [self._played.take(key) for key in keys]
        self.start_clock()
        return received

    def _next(self, what: Any) -> int:
        self._counts[what] = self._counts.get(what, 0) + 1
        return self._counts[what]


class _PlayedHop:
    """A hop in a played group."""

    def __init__(self, exchange: _PlayedExchange, keys: Sequence[tuple[Any, ...]]) -> None:
        self._exchange, self._keys = exchange, keys

    def wait(self) -> list[Tensor]:
        return self._exchange.receive(self._keys)
