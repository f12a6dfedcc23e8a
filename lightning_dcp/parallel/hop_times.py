"""When a rank's hops, collectives and packs happened in a step, at a cost of microseconds each."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from lightning_dcp.parallel.clock_offsets import clock_offset
from lightning_dcp.parallel.core_queue import CoreQueue
from lightning_dcp.parallel.groups import ParallelGroups
from lightning_dcp.parallel.hop_split import (
    NOBODY,
    CollectiveTable,
    HopTable,
    incoming_links,
    outgoing_links,
    split_collectives,
    split_hops,
    times_for_peers,
)
from lightning_dcp.parallel.pack_spans import blocked_spans, pack_spans
from lightning_dcp.parallel.post_times import swap_times
from lightning_dcp.parallel.rank_times import LinkSummary, PackShare, RankSummary
from lightning_dcp.parallel.stamps import stamps_of

RESYNCHRONIZE = 200
"""Steps after which clocks of different machines are compared again: they may run 1e-6 apart."""


class HopMark:
    """The moments of one hop."""

    __slots__ = ("_now", "_recorder", "moments", "places", "sizes")

    def __init__(self, recorder: HopRecorder, places: tuple[int, int], sizes: tuple[int, int]) -> None:
        self._now, self._recorder = recorder.stamps.now, recorder
        self.places, self.sizes = places, sizes
        self.moments: list[Any] = [self._now()]

    def begins(self) -> None:
        """This rank stands still from now on."""
        self._recorder.stands_still()
        self.moments.append(self._now())

    def received(self) -> None:
        """What comes in is there."""
        self.moments.append(self._now())

    def ends(self) -> None:
        """Both directions are done."""
        self.moments.append(self._now())
        self._recorder.goes_on()


class CollectiveMark:
    """The moments of one collective."""

    __slots__ = ("_recorder", "members", "moments")

    def __init__(self, recorder: HopRecorder, members: tuple[int, ...]) -> None:
        self._recorder, self.members = recorder, members
        recorder.stands_still()
        self.moments: list[Any] = [recorder.stamps.now()]

    def ends(self) -> None:
        """It is over."""
        self.moments.append(self._recorder.stamps.now())
        self._recorder.goes_on()


class HopRecorder:
    """Notes what happens on this rank between :meth:`begin_step` and :meth:`finish_step`.

    Made by all ranks of the world at the same time, as clocks of different machines are compared.

    Args:
        groups: the process groups.
        device: where packs are computed.

    Attributes:
        probes: what the step's summary tells of links that were tried.
    """

    def __init__(self, groups: ParallelGroups, device: torch.device) -> None:
        self.stamps = stamps_of(device)
        self.probes: tuple[LinkSummary, ...] = ()
        self._groups, self._device = groups, device
        self._places = {rank: place for place, rank in enumerate(groups.plane_ranks)}
        self._offset, self._several_clocks = clock_offset(groups.control, groups.world_ranks)
        self._active, self._steps = False, 0
        self._members: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._queue = CoreQueue()
        self._clear()

    def _clear(self) -> None:
        self._hops: list[HopMark] = []
        self._collectives: list[CollectiveMark] = []
        self._packs: list[tuple[PackShare, list[Any]]] = []
        self._pauses: list[list[Any]] = []
        self._bounds: list[Any] = []
        self._queued = 0.0

    # ------------------------------------------------------------- during a step

    @property
    def noting(self) -> bool:
        """Whether a step is under way of which anything is noted."""
        return self._active

    def begin_step(self) -> None:
        """The packs of a batch begin; what an unfinished step left is forgotten."""
        if self._several_clocks and self._steps and self._steps % RESYNCHRONIZE == 0:
            self._offset, _ = clock_offset(self._groups.control, self._groups.world_ranks)
        self._steps += 1
        self._clear()
        self._active = True
        if self._device.type != "cuda":  # there the stream tells what the rank is busy with
            self._queue.open()
        self._queued = -self._queue.seconds()
        self._bounds = [self.stamps.now()]

    @contextmanager
    def pack(self, share: PackShare) -> Iterator[None]:
        """Around this rank's work on a pack."""
        if not self._active:
            yield
            return
        moments = [self.stamps.now()]
        yield
        moments.append(self.stamps.now())
        self._packs.append((share, moments))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time inside does not count, and hops inside are not noted: work that is no part of a step, as a trial is.

        All ranks of a group pause for the same hops.
        """
        if not self._active:
            yield
            return
        self._active, moments = False, [self.stamps.now()]
        self.stands_still()
        try:
            yield
        finally:
            self.goes_on()
            self._active = True
            self._pauses.append([*moments, self.stamps.now()])

    def hop_posted(self, source: int, target: int, received: int, sent: int) -> HopMark | None:
        """A hop between ranks of the world is about to be posted; None if it is not noted."""
        if not self._active or not (received or sent):
            return None
        places = self._places[source] if received else NOBODY, self._places[target] if sent else NOBODY
        mark = HopMark(self, places, (received, sent))
        self._hops.append(mark)
        return mark

    def collective_begins(self, ranks: Sequence[int]) -> CollectiveMark | None:
        """A collective of these ranks of the world is about to begin; None if it is not noted."""
        if not self._active:
            return None
        key = tuple(ranks)
        if key not in self._members:
            self._members[key] = tuple(self._places[rank] for rank in key)
        mark = CollectiveMark(self, self._members[key])
        self._collectives.append(mark)
        return mark

    def stands_still(self) -> None:
        """From now on this rank is not busy; if it has to queue for a core, that is no part of its busy time."""
        self._queued += self._queue.seconds()

    def goes_on(self) -> None:
        """The end of :meth:`stands_still`."""
        self._queued -= self._queue.seconds()

    # ------------------------------------------------------------------ at its end

    def finish_step(self, *, packs: bool = False, spans: bool = False) -> RankSummary:
        """What this rank tells the others of the step. Collective: ranks tell their peers when they posted hops.

        Args:
            packs: tell of each pack when it ran.
            spans: and what this rank did in it.
        """
        self._bounds.append(self.stamps.now())
        queued, self._active = self._queued + self._queue.seconds(), False
        self._queue.close()
        (start, end), hops, collectives, edges, pauses = self._tables()
        own = self._groups.rank
        told = swap_times(self._groups.control, self._groups.plane_ranks, times_for_peers(hops, collectives, own))
        moments, together = split_hops(hops, told), split_collectives(collectives, told, hops)
        parts = np.diff(moments, axis=1).sum(axis=0)
        waits = np.diff(together, axis=1).sum(axis=0)
        wait, transfer = float(parts[0] + parts[2] + waits[0]), float(parts[1] + parts[3] + waits[1])
        blocked = blocked_spans(moments, together) if spans else None
        shares = [share for share, _ in self._packs]
        busy = max(0.0, end - start - wait - transfer - float(np.diff(pauses, axis=1).sum()))
        summary = RankSummary(
            own,
            start,
            end,
            busy,
            wait,
            transfer,
            peak_memory(self._device),
            incoming_links(hops, moments, told, own),
            outgoing_links(hops, moments, told, own) if hops.together else (),
            self.probes,
            pack_spans(shares, edges, blocked) if packs or spans else (),
            min(busy, max(0.0, queued)),
        )
        self.probes = ()
        self._clear()
        return summary

    def _tables(self) -> tuple[list[float], HopTable, CollectiveTable, np.ndarray, np.ndarray]:
        """Everything noted, on the common clock: bounds, hops, collectives, packs' edges, pauses."""
        hops = [mark.moments + mark.moments[-1:] * (4 - len(mark.moments)) for mark in self._hops]
        collectives = [mark.moments + mark.moments[-1:] * (2 - len(mark.moments)) for mark in self._collectives]
        rows = [self._bounds, *hops, *collectives, *(edges for _, edges in self._packs), *self._pauses]
        flat = np.array(self.stamps.seconds([moment for row in rows for moment in row])) + self._offset
        sizes = 2, 4 * len(hops), 2 * len(collectives), 2 * len(self._packs), 2 * len(self._pauses)
        bounds, of_hops, of_collectives, edges, pauses = np.split(flat, np.cumsum(sizes)[:-1])
        numbers = np.array([(*m.places, *m.sizes) for m in self._hops], dtype=np.int64).reshape(-1, 4)
        source, target, received, sent = (numbers[:, i] for i in range(4))
        # NCCL makes one kernel of a hop's two directions
        table = HopTable(source, target, received, sent, of_hops.reshape(-1, 4), together=self._device.type == "cuda")
        members = [mark.members for mark in self._collectives]
        pairs = of_collectives.reshape(-1, 2)
        return bounds.tolist(), table, CollectiveTable(members, pairs), edges.reshape(-1, 2), pauses.reshape(-1, 2)


def peak_memory(device: torch.device) -> int:
    """Bytes of device memory that were in use at most, or of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
