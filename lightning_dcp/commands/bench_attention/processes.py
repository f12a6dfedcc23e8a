"""The ranks of a CP group as processes that really communicate: one core each, or one GPU each."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from multiprocessing import connection, get_context, parent_process
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dcp.commands.bench_attention.cases import Setting
from lightning_dcp.commands.bench_attention.check import Outcome, errors, reference
from lightning_dcp.commands.bench_attention.usage import RecordingExchange, Usage, peak_memory
from lightning_dcp.commands.bench_attention.work import ONE_RANK, Times, Work, alone, draw_inputs, shared
from lightning_dcp.errors import PeerFailureError
from lightning_dcp.parallel.clock import WaitClock
from lightning_dcp.parallel.exchange import GroupExchange
from lightning_dcp.parallel.groups import CPGroup
from lightning_dcp.parallel.links import Link, as_link, hop_seconds

_GRACE_S = 5.0
"""Seconds in which the processes end by themselves."""


class ProcessRanks:
    """A group of processes, for the time of a ``with`` block; none of them outlives it, or this process.

    Args:
        size: ranks, c.
        device: the kind: ``cpu`` (gloo, one thread each, a core each where there are enough) or ``cuda`` (NCCL).
    """

    def __init__(self, size: int, device: str) -> None:
        self.size, self._device = size, device
        self._workers: list[tuple[Any, connection.Connection]] = []
        self._folder = tempfile.TemporaryDirectory(prefix="bench-attention-")

    def __enter__(self) -> ProcessRanks:
        # Forked from this process, whose torch may have threads, they could hang; what a new one imports takes seconds.
        context = get_context("forkserver")
        context.set_forkserver_preload([__name__])
        try:
            for rank in range(self.size):
                ours, theirs = context.Pipe()
                args = theirs, rank, self.size, self._device, str(Path(self._folder.name) / "store")
                worker = context.Process(target=_serve, args=args, name=f"rank {rank}", daemon=True)
                worker.start()
                theirs.close()
                self._workers.append((worker, ours))
            self._answers()
        except BaseException:
            self._end(grace_s=0.0)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._end(_GRACE_S if kind is None else 0.0)

    def link(self) -> Link:
        """The slowest hop, measured."""
        small, large = (max(seconds) for seconds in zip(*self._call("hop_seconds"), strict=True))
        return as_link(small, large)

    def prepare(self, setting: Setting) -> None:
        """Make the tensors of a setting on every rank."""
        self._call("prepare", setting)

    def round(self, order: Sequence[str]) -> dict[str, list[Times]]:
        """Time each scheme once, in this order; by scheme what each rank took."""
        ranks: list[dict[str, Times]] = self._call("round", order)
        return {name: [times[name] for times in ranks] for name in order}

    def usage(self, scheme: str) -> list[Usage]:
        """What each rank uses; not timed."""
        return self._call("usage", scheme)

    def check(self, scheme: str) -> list[tuple[dict[str, float], Tensor | None, Tensor | None]]:
        """For each rank its errors, its part of the sinks' gradient, and the whole that there should be."""
        return self._call("check", scheme)

    def _call(self, method: str, *args: Any) -> list[Any]:
        for _, pipe in self._workers:
            pipe.send((method, args))
        return self._answers()

    def _answers(self) -> list[Any]:
        """What each rank answers, once all have.

        Raises:
            PeerFailureError: a rank failed; the others wait for it and are of no more use.
        """
        answers: dict[int, Any] = {}
        pending = {pipe: rank for rank, (_, pipe) in enumerate(self._workers)}
        while pending:
            for pipe in connection.wait(list(pending)):
                rank = pending.pop(pipe)  # type: ignore[call-overload]
                try:
                    good, answers[rank] = self._workers[rank][1].recv()
                except (EOFError, ConnectionError):
                    self._workers[rank][0].join(_GRACE_S)
                    good, answers[rank] = False, f"process ended, exit code {self._workers[rank][0].exitcode}"
                if not good:
                    raise PeerFailureError(f"rank {rank} of {self.size} failed:\n{answers[rank]}")
        return [answers[rank] for rank in range(self.size)]

    def _end(self, grace_s: float) -> None:
        for _, pipe in self._workers:
            pipe.close()  # a rank that waits for work ends by this
        deadline = time.monotonic() + grace_s
        for worker, _ in self._workers:
            worker.join(max(0.0, deadline - time.monotonic()))
            if worker.is_alive():
                worker.kill()
                worker.join()
        self._workers = []
        self._folder.cleanup()


class _Rank:
    """What one process does when it is asked to."""

    def __init__(self, rank: int, size: int, kind: str) -> None:
        self._device = torch.device("cuda", rank) if kind == "cuda" else torch.device(kind)
        group = dist.group.WORLD
        self._group = CPGroup(group, tuple(range(size)))
        self._exchange = GroupExchange(self._group, rank, WaitClock())
        self._wanted: Outcome | None = None

    def hop_seconds(self) -> tuple[float, float]:
        """Of a small and of a large hop."""
        return hop_seconds(self._exchange, self._device)

    def prepare(self, setting: Setting) -> None:
        """Make the tensors of a setting."""
        self._setting, self._wanted = setting, None
        self._pack = draw_inputs(setting, self._device)
        self._recorder = RecordingExchange(self._exchange)
        # One context for all runs: the blocks in it are made once a pack, as in training.
        context = shared(setting, self._group, self._device, self._recorder)
        self._work = Work.of(setting, context, self._pack)
        self._alone = Work.of(setting, alone(setting, self._device), self._pack)

    def _cast(self, scheme: str) -> Work:
        return self._alone if scheme == ONE_RANK else self._work

    def round(self, order: Sequence[str]) -> dict[str, Times]:
        """Time each scheme once; all ranks begin together."""
        return {name: self._time(name) for name in order}

    def _time(self, scheme: str) -> Times:
        work = self._cast(scheme)
        self._recorder.attach(self._exchange)
        self._meet()
        start = self._now()
        _, saved = work.forward(scheme)
        middle = self._now()
        work.backward(scheme, saved)
        end = self._now()
        return Times(middle - start, end - middle, end - start)

    def _meet(self) -> None:
        if self._device.type == "cuda":
            dist.barrier(device_ids=[self._device.index])
        else:
            dist.barrier()

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def usage(self, scheme: str) -> Usage:
        """Run once, watching bytes and memory."""
        self._recorder.attach(self._exchange)
        self._meet()
        with peak_memory(self._device) as peak:
            work = Work.of(self._setting, self._cast(scheme).call.context, self._pack)
            _, saved = work.forward(scheme)
            grads = work.backward(scheme, saved)
            del work, saved, grads
        return Usage(self._recorder.sent_bytes, peak.nbytes)

    def check(self, scheme: str) -> tuple[dict[str, float], Tensor | None, Tensor | None]:
        """Compare with the reference kernel, which every rank runs for itself."""
        if self._wanted is None:
            self._wanted = reference(self._setting, self._pack, self._device)
        work = self._cast(scheme)
        found = Outcome.of(work, scheme)
        sinks = [None if x is None else x.cpu() for x in (found.dsinks, self._wanted.dsinks)]
        return errors(found, self._wanted, work.call.context.pack_index), sinks[0], sinks[1]


def _serve(pipe: connection.Connection, rank: int, size: int, kind: str, store: str) -> None:
    """A rank's process: do what is asked until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C goes to the one that asks; it ends the ranks
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        _settle(rank, size, kind)
        dist.init_process_group(
            "nccl" if kind == "cuda" else "gloo", store=dist.FileStore(store, size), rank=rank, world_size=size
        )
        own = _Rank(rank, size, kind)
        pipe.send((True, None))
        while True:
            method, args = pipe.recv()
            pipe.send((True, getattr(own, method)(*args)))
    except (EOFError, BrokenPipeError):
        dist.destroy_process_group()
    except BaseException:
        pipe.send((False, traceback.format_exc()))


def _settle(rank: int, size: int, kind: str) -> None:
    """Give a rank its own GPU; or one thread, and a core of its own where there are enough."""
    if kind == "cuda":
        torch.cuda.set_device(rank)
        return
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        if size <= len(cores):
            os.sched_setaffinity(0, {cores[rank]})


def _end_with_parent() -> None:
    """End this process as soon as the one that started it has ended, however that came about."""
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)
