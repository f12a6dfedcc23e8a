"""How long this thread could have gone on but had no core: what the system's scheduler takes is no rank's own slowness."""

from __future__ import annotations

import os


class CoreQueue:
    """Counts for one thread, the one that calls :meth:`open`; Linux tells, elsewhere it is 0.

    A read takes one or two microseconds, as the file stays open.
    """

    def __init__(self) -> None:
        self._file: int | None = None

    def open(self) -> None:
        """Count for the calling thread."""
        self.close()
        try:
            self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
            self.seconds()
        except (OSError, IndexError, ValueError):  # not Linux, or built without these counts
            self.close()

    def close(self) -> None:
        """Let go of the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def seconds(self) -> float:
        """Seconds in the queue for a core since the thread began."""
        return 0.0 if self._file is None else 1e-9 * int(os.pread(self._file, 80, 0).split()[1])
