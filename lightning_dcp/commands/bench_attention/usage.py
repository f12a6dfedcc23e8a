"""What an attention call uses: bytes that a rank sends, and the most memory that its tensors take."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_dcp.commands.bench_attention.timeline import Collective, Event, HopStart, HopWait
from lightning_dcp.parallel.exchange import Exchange, Transfer, split_message


class Usage(NamedTuple):
    """Of one rank, forward and backward together.

    Attributes:
        sent_bytes: bytes that it sends to other ranks.
        peak_bytes: the most bytes of tensors at a time, with its queries, keys, values and the output's gradient.
    """

    sent_bytes: int
    peak_bytes: int


class LiveBytes(TorchDispatchMode):
    """While active, adds up the memory of all tensors that are made, until they are freed.

    What a kernel takes for itself while it runs is not seen.

    Attributes:
        peak: the most bytes at a time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._live: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run the operation and note what it made."""
        kwargs = kwargs or {}
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        result = func(*args, **kwargs)
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and x.untyped_storage()._cdata not in given:
                self._note(x.untyped_storage())
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._live:
            self._live[key] = storage.nbytes()
            weakref.finalize(storage, self._live.pop, key, None)
            self.peak = max(self.peak, sum(self._live.values()))


@dataclass
class PeakMemory:
    """The most memory that was taken inside :func:`peak_memory`."""

    nbytes: int = 0


@contextmanager
def peak_memory(device: torch.device) -> Iterator[PeakMemory]:
    """Measure the most memory that tensors take: by CUDA's allocator there, else by watching tensors."""
    result = PeakMemory()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        yield result
        torch.cuda.synchronize(device)
        result.nbytes = torch.cuda.max_memory_allocated(device) - before
    else:
        with LiveBytes() as live:
            yield result
        result.nbytes = live.peak


class RecordingExchange(Exchange):
    """Passes on to another exchange what a rank sends, and keeps a record of it.

    Attributes:
        events: what was communicated, and how long the rank had computed by then.
    """

    def __init__(self, inner: Exchange) -> None:
        self.rank, self.size = inner.rank, inner.size
        self.attach(inner)

    def attach(self, inner: Exchange, busy: Callable[[], float] = float) -> None:
        """Begin a new record.

        Args:
            inner: does the work; of the same rank.
            busy: seconds for which the rank had computed when the last call to ``inner`` began; 0 if it matters not.
        """
        self._inner, self._busy, self._ring = inner, busy, inner.ring
        self._hops: dict[int, int] = {}
        self.events: list[Event] = []

    @property
    def sent_bytes(self) -> int:
        """Bytes sent to other ranks since the record began."""
        return sum(event.sent_bytes for event in self.events if not isinstance(event, HopWait))

    def start_hop(self, tensors: Sequence[Tensor], tokens: int, *, tag: int) -> Transfer:  # noqa: D102
        transfer = self._inner.start_hop(tensors, tokens, tag=tag)
        self._hops[tag] = number = self._hops.get(tag, 0) + 1
        self.events.append(HopStart(self._busy(), (tag, number), _nbytes(tensors)))
        return _RecordedHop(transfer, lambda: self.events.append(HopWait(self._busy(), (tag, number))))

    def all_gather(self, local: Tensor, tokens: Sequence[int]) -> Tensor:  # noqa: D102
        whole = self._inner.all_gather(local, tokens)
        self._collective((self.size - 1) * _nbytes([local]))
        return whole

    def reduce_scatter(self, shares: Tensor, tokens: Sequence[int]) -> Tensor:  # noqa: D102
        own = self._inner.reduce_scatter(shares, tokens)
        self._collective(_nbytes([shares]) - _nbytes([own]))
        return own

    def all_to_all(self, parts: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> list[Tensor]:  # noqa: D102
        received = self._inner.all_to_all(parts, shapes)
        self._collective(_nbytes([part for rank, part in enumerate(parts) if rank != self.rank]))
        return received

    def _collective(self, sent_bytes: int) -> None:
        if self.size > 1:
            self.events.append(Collective(self._busy(), sent_bytes))


class _RecordedHop:
    """A hop whose end is noted."""

    def __init__(self, transfer: Transfer, note: Callable[[], None]) -> None:
        self._transfer, self._note = transfer, note

    def wait(self) -> list[Tensor]:
        received = self._transfer.wait()
        self._note()
        return received


class SilentExchange(Exchange):
    """One rank's communication without any other ranks: what comes in is 0, in buffers as large as real ones.

    With it a rank takes as much memory as in a group, on a device that it has for itself.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def start_hop(self, tensors: Sequence[Tensor], tokens: int, *, tag: int) -> Transfer:  # noqa: D102
        sent = torch.cat([t.reshape(-1) for t in tensors])
        shapes = [torch.Size((tokens, *t.shape[1:])) for t in tensors]
        return _SilentHop(sent, sent.new_zeros(sum(shape.numel() for shape in shapes)), shapes)

    def all_gather(self, local: Tensor, tokens: Sequence[int]) -> Tensor:  # noqa: D102
        return torch.cat([local.new_zeros(count, *local.shape[1:]) for count in tokens])

    def reduce_scatter(self, shares: Tensor, tokens: Sequence[int]) -> Tensor:  # noqa: D102
        sent, received = shares.clone(), shares.new_zeros(self.size, tokens[self.rank], *shares.shape[1:])
        del sent
        return received[0]

    def all_to_all(self, parts: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> list[Tensor]:  # noqa: D102
        sent = torch.cat([part.reshape(-1) for part in parts])
        sizes = [torch.Size(shape) for shape in shapes]
        return split_message(sent.new_zeros(sum(size.numel() for size in sizes)), sizes)


class _SilentHop:
    """A hop that brings nothing."""

    def __init__(self, sent: Tensor, received: Tensor, shapes: Sequence[torch.Size]) -> None:
        self._sent: Tensor | None = sent  # held until the transfer ends, as a real one
        self._received, self._shapes = received, shapes

    def wait(self) -> list[Tensor]:
        self._sent = None
        return split_message(self._received, self._shapes)


def _nbytes(tensors: Sequence[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)
