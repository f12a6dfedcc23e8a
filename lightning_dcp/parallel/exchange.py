"""What the ranks of a CP group send to each other: the four patterns that attention and sharding are made of."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dcp.parallel.clock import WaitClock
from lightning_dcp.parallel.groups import CPGroup
from lightning_dcp.parallel.hop_times import HopMark
from lightning_dcp.parallel.ring_order import checked_ring


class Transfer(Protocol):
    """One hop under way; compute may go on until :meth:`wait`."""

    def wait(self) -> list[Tensor]:
        """The tensors that came in, once both directions are done."""


class Exchange(ABC):
    """Communication inside one CP group. All ranks of the group call the same method in the same order.

    Shares may be of unequal size and empty; every rank knows all sizes beforehand, so none are sent.

    Attributes:
        rank: this rank's place in the group.
        size: ranks of the group, c.
    """

    rank: int
    size: int
    _ring: tuple[int, ...] | None = None

    @property
    def ring(self) -> tuple[int, ...]:
        """The group's places in the order in which hops visit them; the last one's next is the first."""
        return self._ring or tuple(range(self.size))

    @property
    def neighbours(self) -> tuple[int, int]:
        """The places that this rank's hops go to and come from."""
        ring = self.ring
        own = ring.index(self.rank)
        return ring[(own + 1) % self.size], ring[own - 1]

    @abstractmethod
    def start_hop(self, tensors: Sequence[Tensor], tokens: int, *, tag: int) -> Transfer:
        """Send tensors to the next rank of the ring and receive the previous rank's.

        Args:
            tensors: ``[T_own, ...]`` each, of one dtype, not written to before the transfer is over.
            tokens: tokens of what comes in; its other dimensions are those of ``tensors``.
            tag: tells apart transfers that are under way at the same time.
        """

    @abstractmethod
    def all_gather(self, local: Tensor, tokens: Sequence[int]) -> Tensor:
        """The shares of all ranks, one after another: ``[tokens[rank], ...]`` to ``[sum(tokens), ...]``."""

    @abstractmethod
    def reduce_scatter(self, shares: Tensor, tokens: Sequence[int]) -> Tensor:
        """The reverse: ``[sum(tokens), ...]`` on each rank to the sum of this rank's share, ``[tokens[rank], ...]``.

        Two runs give the same bits: parts are added in the order of the ranks, or as NCCL does it for a given group.
        """

    @abstractmethod
    def all_to_all(self, parts: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        """Send one part to each rank and receive one from each.

        Args:
            parts: for each rank what it gets; of one dtype.
            shapes: for each rank the shape of what comes from it.
        """


class GroupExchange(Exchange):
    """Communication by ``torch.distributed``.

    Args:
        group: the CP group.
        rank: this rank's place in it.
        clock: adds up the time this rank waits.
        ring: the group's places in the order in which hops visit them; by default that of the ranks.

    Raises:
        PlanError: a ring that is no permutation of the group's places.
    """

    def __init__(self, group: CPGroup, rank: int, clock: WaitClock, ring: Sequence[int] | None = None) -> None:
        self.rank, self.size = rank, group.size
        self._ring = None if ring is None else checked_ring(ring, group.size)
        self._group, self._clock = group, clock

    def start_hop(self, tensors: Sequence[Tensor], tokens: int, *, tag: int) -> Transfer:  # noqa: D102
        handle = self._group.handle
        following, previous = (self._group.global_ranks[place] for place in self.neighbours)
        sent = _one_message(tensors)
        shapes = [torch.Size((tokens, *t.shape[1:])) for t in tensors]
        received = sent.new_empty(sum(shape.numel() for shape in shapes))
        mark = self._clock.hop_posted(previous, following, received.nbytes, sent.nbytes)
        ops = []
        # An empty share is not sent; both ends know from the layout that it is empty.
        if received.numel():
            ops.append(dist.P2POp(dist.irecv, received, previous, handle, tag))
        if sent.numel():
            ops.append(dist.P2POp(dist.isend, sent, following, handle, tag))
        works = dist.batch_isend_irecv(ops) if ops else []
        return Hop(sent, received, shapes, works, self._clock, mark, previous)

    def all_gather(self, local: Tensor, tokens: Sequence[int]) -> Tensor:  # noqa: D102
        if self.size == 1:
            return local
        padded = _padded(local, max(tokens))
        received = padded.new_empty((self.size, *padded.shape))
        with self._clock.collective(self._group.global_ranks):
            dist.all_gather(list(received.unbind()), padded, group=self._group.handle)
        if min(tokens) == max(tokens):
            return received.flatten(0, 1)
        return torch.cat([share[:count] for share, count in zip(received, tokens, strict=True)])

    def reduce_scatter(self, shares: Tensor, tokens: Sequence[int]) -> Tensor:  # noqa: D102
        if self.size == 1:
            return shares
        parts = shares.split(list(tokens))
        if dist.get_backend(self._group.handle) == "nccl":
            return self._native_reduce_scatter(parts, max(tokens))
        # Gloo's own takes more than twice as long.
        received = self.all_to_all(parts, [parts[self.rank].shape] * self.size)
        total = received[0]
        for part in received[1:]:
            total += part
        return total

    def _native_reduce_scatter(self, parts: Sequence[Tensor], largest: int) -> Tensor:
        padded = torch.cat([_padded(part, largest) for part in parts])
        received = padded.new_empty((largest, *padded.shape[1:]))
        with self._clock.collective(self._group.global_ranks):
            dist.reduce_scatter_tensor(received, padded, group=self._group.handle)
        return received[: len(parts[self.rank])]

    def all_to_all(self, parts: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> list[Tensor]:  # noqa: D102
        if self.size == 1:
            return list(parts)
        sizes = [torch.Size(shape).numel() for shape in shapes]
        received = parts[0].new_empty(sum(sizes))
        with self._clock.collective(self._group.global_ranks):
            dist.all_to_all_single(
                received,
                _one_message(parts),
                sizes,
                [part.numel() for part in parts],
                group=self._group.handle,
            )
        return [part.view(*shape) for part, shape in zip(received.split(sizes), shapes, strict=True)]


class Hop:
    """A hop by ``torch.distributed``.

    Args:
        sent: must live until the transfer ends.
        received: what comes in, flat.
        shapes: of the tensors in it.
        works: of the incoming message, if there is one, and of the outgoing one; or one of both (NCCL).
        clock: where waiting is counted.
        mark: gets the times of this hop, where they are wanted.
        source: rank in the world from which the incoming message comes.
    """

    def __init__(
        self,
        sent: Tensor | None,
        received: Tensor,
        shapes: Sequence[torch.Size],
        works: Sequence[dist.Work],
        clock: WaitClock,
        mark: HopMark | None,
        source: int,
    ) -> None:
        self._sent = sent
        self._received, self._shapes, self._works, self._clock, self._mark = received, shapes, works, clock, mark
        self.source = source

    def wait(self) -> list[Tensor]:
        """The tensors that came in, once both directions are done."""
        mark = self._mark
        with self._clock.waiting():
            if mark is not None:
                mark.begins()
            self._receive()
            if mark is not None:
                mark.received()
            for work in self._works[1:]:
                work.wait()
            if mark is not None:
                mark.ends()
        self._sent, self._works = None, ()  # works hold on to what was sent
        return split_message(self._received, self._shapes)

    def _receive(self) -> None:
        """Wait for what comes in; where nothing does, for what is sent."""
        if self._works:
            self._works[0].wait()


def split_message(message: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """The tensors of which a message is made, as views of it."""
    ends = [0, *accumulate(shape.numel() for shape in shapes)]
    return [message[a:b].view(shape) for (a, b), shape in zip(pairwise(ends), shapes, strict=True)]


def _one_message(tensors: Sequence[Tensor]) -> Tensor:
    """All tensors in one; what lies one after another in memory already, as what came in by a hop does, is not copied."""
    first = tensors[0]
    total = sum(t.numel() for t in tensors)
    ends = accumulate((t.numel() for t in tensors), initial=first.storage_offset())
    joined = all(
        t.is_contiguous()
        and t.storage_offset() == end
        and t.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        for t, end in zip(tensors, ends, strict=False)
    )
    if joined:
        return first.as_strided((total,), (1,))
    return torch.cat([t.reshape(-1) for t in tensors])


def _padded(share: Tensor, tokens: int) -> Tensor:
    if len(share) == tokens:
        return share.contiguous()
    padded = share.new_zeros((tokens, *share.shape[1:]))
    padded[: len(share)] = share
    return padded
