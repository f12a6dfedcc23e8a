"""Ranks for tests: forked once from a process that has imported everything, and reused.

A job is a function of a test module. It runs in the first ``world`` workers, each in its own environment as a rank of
Lightning's subprocess launcher would see it; what rank 0..world-1 returned comes back as a list.
"""

from __future__ import annotations

import gc
import os
import shutil
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any


class RankFailure(AssertionError):
    """A job failed; holds the tracebacks of the ranks that failed, by rank."""

    def __init__(self, failures: dict[int, str]) -> None:
        self.failures = failures
        super().__init__("\n".join(f"--- rank {rank} ---\n{text}" for rank, text in sorted(failures.items())))


class RankPool:
    """Workers that run jobs together.

    Args:
        size: the largest world.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._workers: list[tuple[Any, Connection]] = []

    def run(self, job: Callable[..., Any], world: int, *args: Any, timeout: float = 120, **kwargs: Any) -> list[Any]:
        """Run ``job(*args, **kwargs)`` on ranks 0..world-1 and return what each gave.

        Raises:
            RankFailure: a rank raised, died, or did not answer in time (then all workers are replaced).
        """
        results = self.run_all(job, world, *args, timeout=timeout, **kwargs)
        failures = {rank: text for rank, (ok, text) in enumerate(results) if not ok}
        if failures:
            raise RankFailure(failures)
        return [value for _, value in results]

    def run_all(
        self, job: Callable[..., Any], world: int, *args: Any, timeout: float = 120, **kwargs: Any
    ) -> list[tuple[bool, Any]]:
        """As :meth:`run`, but each rank's outcome: ``(True, value)`` or ``(False, traceback)``."""
        self._start()
        environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "NODE_RANK": "0"}
        # Lightning forgets WORLD_SIZE at the end of a run; jobs with several runs need it again
        environment |= {"WORLD_SIZE": str(world), "TEST_WORLD_SIZE": str(world)}
        for rank in range(world):
            self._workers[rank][1].send((environment | {"LOCAL_RANK": str(rank), "RANK": str(rank)}, job, args, kwargs))
        outcomes = self._collect(world, time.monotonic() + timeout)
        if not all(ok for ok, _ in outcomes):
            self.close()  # a rank that failed in the middle leaves groups and threads behind
        return outcomes

    def _collect(self, world: int, deadline: float) -> list[tuple[bool, Any]]:
        outcomes: list[tuple[bool, Any]] = [(False, "no answer in time")] * world
        pending = {self._workers[rank][1]: rank for rank in range(world)}
        while pending and (left := deadline - time.monotonic()) > 0:
            for connection in wait(list(pending), timeout=left):
                rank = pending.pop(connection)
                try:
                    outcomes[rank] = connection.recv()
                except EOFError:
                    outcomes[rank] = (False, f"process ended: {self._workers[rank][0].exitcode}")
        return outcomes

    def _start(self) -> None:
        if self._workers:
            return
        context = get_context("fork")
        for _ in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,))  # no daemon: loaders fork workers
            process.start()
            theirs.close()
            self._workers.append((process, ours))

    def close(self) -> None:
        """End all workers; the next run starts new ones."""
        for process, connection in self._workers:
            connection.close()
            process.kill()
            process.join()
        self._workers = []


def _serve(connection: Connection) -> None:
    directory = tempfile.mkdtemp(prefix="rank-")
    os.chdir(directory)
    try:
        while True:
            try:
                environment, job, args, kwargs = connection.recv()
            except EOFError:
                return
            outcome = _attempt(environment, job, args, kwargs)
            connection.send(outcome)
            if not outcome[0]:
                os._exit(1)  # as a script would end: its peers must notice by themselves
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _attempt(environment: dict[str, str], job: Callable[..., Any], args: Any, kwargs: Any) -> tuple[bool, Any]:
    os.environ.update(environment)
    try:
        value = job(*args, **kwargs)
        _leave_world()
    except BaseException:
        return False, traceback.format_exc()
    for name in (
        *environment,
        "PL_GLOBAL_SEED",
        "PL_SEED_WORKERS",
    ):  # jobs on fewer ranks must not seed some of the next's
        os.environ.pop(name, None)
    return True, value


def _leave_world() -> None:
    import torch.distributed as dist
    from megatron.core import parallel_state

    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
    gc.collect()  # groups left over must not be freed in a worker that a data loader forks later: that hangs


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
