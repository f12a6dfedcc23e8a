"""When a rank fails, the others end soon and say which rank it was and why."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from lightning_dcp.errors import PeerFailureError

_FAILURE = "failure"
_NETWORK_WORDS = ("gloo", "nccl", "connection closed by peer", "connection reset by peer", "broken pipe")


class Watchdog:
    """Watches the ranks of a world through the store they met in.

    Each rank writes a sign of life every ``interval`` seconds and reads that of the next rank, so the store's load
    grows with the world only once. The first failure is written to one key that all read. A rank whose main thread does
    not end by itself within ``grace`` seconds of a failure (it may hang in a collective) is ended by force.

    Args:
        store: the store of the default process group.
        rank: this rank.
        world_size: all ranks.
        interval: seconds between signs of life.
        stale_after: silence after which a rank counts as dead, in seconds.
        grace: seconds between a failure and the end by force.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        *,
        interval: float = 1.0,
        stale_after: float = 30.0,
        grace: float = 10.0,
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self.interval, self.stale_after, self.grace = interval, stale_after, grace
        # A connection of its own, as the main thread may block on the other; and names of its own, as an earlier run in
        # these processes may have left a failure behind. All ranks have made equally many watchdogs.
        own: dist.Store = store.clone()  # type: ignore[attr-defined]
        self._store = dist.PrefixStore(f"dcp/{own.add(f'dcp/runs/{rank}', 1)}", own)
        self._failure: str | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to watch. Collective: signs of life start when all ranks have."""
        self._store.set(f"process/{self.rank}", f"{socket.gethostname()} {os.getpid()}")
        self._sign_of_life()
        dist.barrier()
        self._thread = threading.Thread(target=self._watch, name="dcp-watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop watching, at the end of a run. Collective, unless this rank has reported a failure.

        No rank stops before all are done: the store would go with the rank that holds it.
        """
        if not self._stop.is_set():
            with self.naming_failures():
                dist.barrier()
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=2 * self.interval)

    def report(self, error: BaseException) -> None:
        """Tell the others that this rank failed. The rank that holds the store stays until they have read it."""
        if self._stop.is_set():
            return
        if not isinstance(error, PeerFailureError):
            reason = " ".join(str(error).split()).encode("utf-8", "backslashreplace").decode()
            self._record(f"rank {self.rank} failed: {type(error).__name__}: {reason[:2000]}")
        self._stop.set()
        if self.rank == 0:
            time.sleep(2 * self.interval)

    @contextmanager
    def naming_failures(self) -> Iterator[None]:
        """Turn the bare network error that a peer's end causes into one that names the peer."""
        try:
            yield
        except (RuntimeError, OSError) as error:
            if isinstance(error, PeerFailureError) or not any(w in str(error).lower() for w in _NETWORK_WORDS):
                raise
            failure = self._wait_for_failure()
            if failure is None or failure.startswith(f"rank {self.rank} "):
                raise
            raise PeerFailureError(f"{failure} (rank {self.rank} stops)") from error

    def _wait_for_failure(self) -> str | None:
        deadline = time.monotonic() + self.stale_after + 2 * self.interval
        while time.monotonic() < deadline:
            failure = self._failure or self._read_failure() or self._dead_neighbour_process()
            if failure is not None:
                self._record(failure)
                return self._failure
            time.sleep(self.interval / 4)
        return None

    def _watch(self) -> None:
        watched = (self.rank + 1) % self.world_size
        last, seen = b"", time.monotonic()
        while not self._stop.wait(self.interval):
            try:
                self._sign_of_life()
                sign = self._store.get(f"alive/{watched}")
                failure = self._read_failure()
            except (RuntimeError, OSError):
                failure, sign = "rank 0 failed: its process, which held the store of all ranks, is gone", b"gone"
            if sign != last:
                last, seen = sign, time.monotonic()
            if failure is None and time.monotonic() - seen > self.stale_after:
                failure = (
                    f"rank {watched} failed: no sign of life for {self.stale_after:.0f} s (killed, or its node is gone)"
                )
            if failure is not None:
                self._record(failure)
                self._end_by_force()
                return

    def _end_by_force(self) -> None:
        if not self._stop.wait(self.grace):
            print(f"[lightning-dcp] {self._failure} (rank {self.rank} is stopped)", file=sys.stderr, flush=True)  # noqa: T201
            os._exit(1)

    def _sign_of_life(self) -> None:
        self._store.set(f"alive/{self.rank}", str(time.time_ns()))

    def _record(self, failure: str) -> None:
        """Keep the first failure that any rank told of."""
        try:
            self._failure = self._store.compare_set(_FAILURE, "", failure).decode() or failure
        except (RuntimeError, OSError):
            self._failure = self._failure or failure

    def _read_failure(self) -> str | None:
        try:
            return self._store.get(_FAILURE).decode() if self._store.check([_FAILURE]) else None
        except (RuntimeError, OSError):
            return self._failure

    def _dead_neighbour_process(self) -> str | None:
        """A rank on this host whose process is gone, if there is one."""
        for rank in range(self.world_size):
            try:
                host, pid = self._store.get(f"process/{rank}").decode().split()
            except (RuntimeError, OSError):
                return None
            if host == socket.gethostname() and not _is_alive(int(pid)):
                return f"rank {rank} failed: its process {pid} is gone (killed, out of memory, or crashed)"
        return None


def _is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended but was not waited for (a zombie) does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False if Path("/proc/self/stat").exists() else _answers(pid)
    except OSError:
        return False
    return state not in ("Z", "X")


def _answers(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
