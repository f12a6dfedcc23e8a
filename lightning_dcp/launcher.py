"""Lightning's subprocess launcher, with an observer that says which child died before it ends the others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch import Trainer
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher

_GRACE = 20.0
"""Seconds that the other ranks have to end with a message of their own."""


class DCPSubprocessLauncher(_SubprocessScriptLauncher):
    """Starts one process a device by running the script again; Lightning's own ends all without a word if one dies."""

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        """Start the other ranks of this node, then run the function as rank 0 of it."""
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not self.cluster_environment.creates_processes_externally:
            self._call_children_scripts()
            threading.Thread(target=_observe, args=(self.procs,), name="dcp-child-observer", daemon=True).start()
        _set_num_threads_if_needed(num_processes=self.num_processes)
        return function(*args, **kwargs)


def _observe(children: list[subprocess.Popen[bytes]], interval: float = 0.5) -> None:
    """Wait until all children are done or one fails; then say so, and end what does not end by itself."""
    while any(child.poll() is None for child in children) and not any(child.returncode for child in children):
        time.sleep(interval)
    failed = next(((rank, child) for rank, child in enumerate(children, 1) if child.returncode), None)
    if failed is None:
        return
    rank, child = failed
    code = child.returncode
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    print(f"[lightning-dcp] local rank {rank} ended early ({how}); ending the others", file=sys.stderr, flush=True)  # noqa: T201
    time.sleep(_GRACE)
    for other in children:
        if other.poll() is None:
            other.kill()
    os.kill(os.getpid(), signal.SIGKILL)
