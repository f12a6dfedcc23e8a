"""The ranks of a CP group played one after another by one device; their communication is modelled.

Each rank's compute is measured as if it had the device for itself, and put on a timeline with what it sends and waits
for. Autograd is left out: on CUDA it runs a backward on threads of its own, where no rank can wait for another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from lightning_dcp.commands.bench_attention.cases import Setting
from lightning_dcp.commands.bench_attention.check import Outcome, errors, reference
from lightning_dcp.commands.bench_attention.timeline import RankRecord, end_times
from lightning_dcp.commands.bench_attention.usage import RecordingExchange, SilentExchange, Usage, peak_memory
from lightning_dcp.commands.bench_attention.work import ONE_RANK, Times, Work, alone, draw_inputs, shared
from lightning_dcp.parallel.context import CPContext
from lightning_dcp.parallel.exchange import Exchange
from lightning_dcp.parallel.groups import CPGroup
from lightning_dcp.parallel.links import Link
from lightning_dcp.parallel.played import PlayedGroup


class PlayedRanks:
    """A group of ranks that one device plays.

    Args:
        size: ranks, c.
        device: the kind: ``cuda``, or ``cpu`` with one thread.
        link: what is assumed between ranks.
    """

    def __init__(self, size: int, device: str, link: Link) -> None:
        self.size, self._link = size, link
        self._device = torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device(device)
        self._wanted: Outcome | None = None

    def __enter__(self) -> PlayedRanks:
        self._threads = torch.get_num_threads()
        if self._device.type == "cpu":
            torch.set_num_threads(1)  # as ranks that are processes; and each new thread would start helpers of its own
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        torch.set_num_threads(self._threads)

    def link(self) -> Link:
        """What is assumed."""
        return self._link

    def prepare(self, setting: Setting) -> None:
        """Make the tensors of a setting."""
        self._setting, self._wanted = setting, None
        self._pack = draw_inputs(setting, self._device)
        group = CPGroup(None, tuple(range(self.size)))
        # One context a rank for all runs: the blocks in it are made once a pack, as in training.
        self._exchanges = [RecordingExchange(SilentExchange(rank, self.size)) for rank in range(self.size)]
        self._contexts = [shared(setting, group, self._device, exchange) for exchange in self._exchanges]
        self._works = [Work.of(setting, context, self._pack) for context in self._contexts]
        self._alone_exchange = RecordingExchange(SilentExchange(0, 1))
        self._alone = Work.of(setting, alone(setting, self._device), self._pack)

    def round(self, order: Sequence[str]) -> dict[str, list[Times]]:
        """Run each scheme once, in this order; by scheme what each rank would take."""
        return {name: self._time(name) for name in order}

    def _time(self, scheme: str) -> list[Times]:
        works, exchanges = self._cast(scheme)
        forward, records = self._play(exchanges, lambda rank: works[rank].forward(scheme)[1])
        middles = end_times(records, self._link)
        _, records = self._play(exchanges, lambda rank: works[rank].backward(scheme, forward[rank]))
        ends = end_times(records, self._link, middles)
        return [Times(middle, end - middle, end) for middle, end in zip(middles, ends, strict=True)]

    def _cast(self, scheme: str) -> tuple[Sequence[Work], Sequence[RecordingExchange]]:
        """Who plays."""
        return ([self._alone], [self._alone_exchange]) if scheme == ONE_RANK else (self._works, self._exchanges)

    def _play(
        self, exchanges: Sequence[RecordingExchange], act: Callable[[int], Any]
    ) -> tuple[list[Any], list[RankRecord]]:
        """Run something on every rank: what each returned, and what it did meanwhile."""
        played = PlayedGroup(len(exchanges), self._device)

        def job(exchange: Exchange) -> Any:
            record = played.ranks[exchange.rank]
            exchanges[exchange.rank].attach(exchange, lambda: record.busy_seconds)
            return act(exchange.rank)

        results = played.run(job)
        pairs = zip(exchanges, played.ranks, strict=True)
        return results, [RankRecord(exchange.events, rank.busy_seconds) for exchange, rank in pairs]

    def usage(self, scheme: str) -> list[Usage]:
        """What each rank uses when it runs by itself; what it receives is 0 then."""
        if scheme == ONE_RANK:
            return [self._usage_of(scheme, self._alone.call.context, self._alone_exchange)]
        return [
            self._usage_of(scheme, context, exchange)
            for context, exchange in zip(self._contexts, self._exchanges, strict=True)
        ]

    def _usage_of(self, scheme: str, context: CPContext, exchange: RecordingExchange) -> Usage:
        exchange.attach(SilentExchange(exchange.rank, exchange.size))
        with peak_memory(self._device) as peak:
            work = Work.of(self._setting, context, self._pack)
            _, saved = work.forward(scheme)
            grads = work.backward(scheme, saved)
            del work, saved, grads
        return Usage(exchange.sent_bytes, peak.nbytes)

    def check(self, scheme: str) -> list[tuple[dict[str, float], Tensor | None, Tensor | None]]:
        """For each rank its errors, its part of the sinks' gradient, and the whole that there should be."""
        if self._wanted is None:
            self._wanted = reference(self._setting, self._pack, self._device)
        wanted = self._wanted
        works, exchanges = self._cast(scheme)
        found, _ = self._play(exchanges, lambda rank: Outcome.of(works[rank], scheme))
        return [
            (errors(outcome, wanted, work.call.context.pack_index), outcome.dsinks, wanted.dsinks)
            for outcome, work in zip(found, works, strict=True)
        ]
