"""When things happen on a rank: by the host's clock, or on its CUDA device in the order of its stream."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch


class Stamps(Protocol):
    """Marks moments cheaply; what o'clock they were is asked later, for many at once."""

    def now(self) -> Any:
        """Mark this moment."""

    def seconds(self, stamps: Sequence[Any]) -> list[float]:
        """When these moments were, on the scale of ``time.perf_counter``."""


class HostStamps:
    """The host's clock. On Linux it is the same for all processes of one machine."""

    now = staticmethod(time.perf_counter)

    def seconds(self, stamps: Sequence[float]) -> list[float]:
        """The moments as they are."""
        return list(stamps)


class CudaStamps:
    """Events on the current stream: when the device comes to that place, not when the host asked for it.

    ``work.wait()`` of NCCL does not hold the host up but the stream, so that only the stream knows how long it took.

    Args:
        device: whose streams are marked.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[torch.cuda.Event] = []
        self._used = 0

    def now(self) -> torch.cuda.Event:
        """Mark this place of the current stream."""
        if self._used == len(self._events):
            self._events.append(torch.cuda.Event(enable_timing=True))
        event = self._events[self._used]
        self._used += 1
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, stamps: Sequence[torch.cuda.Event]) -> list[float]:
        """When the device came to these places; waits for it. All events are used anew afterwards.

        The reference is an event at this moment, on an idle device, so that the host's clock can be read beside it. Events
        tell float32 milliseconds between two of them, which is exact enough for the length of a step, not of a run.
        """
        torch.cuda.synchronize(self._device)
        reference = torch.cuda.Event(enable_timing=True)
        reference.record(torch.cuda.current_stream(self._device))
        reference.synchronize()
        host = time.perf_counter()
        self._used = 0
        return [host - 1e-3 * event.elapsed_time(reference) for event in stamps]


def stamps_of(device: torch.device) -> Stamps:
    """What marks moments of work on a device."""
    return CudaStamps(device) if device.type == "cuda" else HostStamps()
