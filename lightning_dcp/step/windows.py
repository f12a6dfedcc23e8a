"""``torchmetrics.wrappers.Running``: its window moves once for each update of a batch, not of a pack."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn
from torchmetrics.wrappers import Running

from lightning_dcp.errors import BatchError
from lightning_dcp.step.metric_state import join_states, snapshot


class Window:
    """One ``Running`` metric during one batch.

    The n-th update of each pack is a share of the n-th update of the batch. After the batch, each rank's window holds
    what its own packs gave, at the same place on all ranks; computing it adds up the ranks.
    """

    def __init__(self, metric: Running) -> None:
        self.metric = metric
        self.moves = 0
        self._shares: dict[int, dict[str, Any]] = {}
        self._first = metric._num_vals_seen

    @contextmanager
    def pack(self, *, leader: bool) -> Iterator[None]:
        """Around one pack: keep what it puts into the window (on its leader), and move the window back."""
        before, moves, shares = snapshot(self.metric), self.moves, dict(self._shares)
        try:
            yield
            if leader:
                before["_update_count"] += self._take()
            else:  # whatever was kept inside, as when a pack is tried out
                self.moves, self._shares = moves, shares
        finally:
            vars(self.metric).update(before)

    def _take(self) -> int:
        """Keep what the pack put in; how often it was updated (torchmetrics does not count calls of the metric)."""
        moves = self.metric._num_vals_seen - self._first
        if self._shares and moves != self.moves:
            raise BatchError(
                f"Running({type(self.metric.base_metric).__name__}) was updated {self.moves} times for one pack of the "
                f"batch and {moves} times for another; update it as often for every pack"
            )
        self.moves = moves
        for move in range(max(0, moves - self.metric.window), moves):
            share = {key: getattr(self.metric, name) for key, name in self._names(move).items()}
            parts = [self._shares[move], share] if move in self._shares else [share]
            self._shares[move] = join_states(self.metric.base_metric._reductions, parts)
        return moves

    def close(self, moves: int) -> None:
        """Move the window this often, on every rank alike; a rank without packs puts nothing in."""
        for move in range(max(0, moves - self.metric.window), moves):
            for key, name in self._names(move).items():
                default = self.metric.base_metric._defaults[key]
                share = self._shares[move][key] if move in self._shares else None
                fresh: Any = default.clone() if not isinstance(default, list) else []
                setattr(self.metric, name, fresh if share is None else share)
        self.metric._num_vals_seen = self._first + moves

    def _names(self, move: int) -> dict[str, str]:
        """The attributes that hold the states after this update, by state."""
        place = (self._first + move) % self.metric.window
        return {key: f"{key}_{place}" for key in self.metric.base_metric._defaults}


def windows_of(module: nn.Module) -> list[Window]:
    """The windows of a module's metrics, at the beginning of a batch."""
    return [Window(child) for child in module.modules() if isinstance(child, Running)]


def close_windows(windows: list[Window], group: dist.ProcessGroup) -> None:
    """Move all windows once the packs of a batch are done. Collective, if there are any windows."""
    if not windows:
        return
    every: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(every, [window.moves for window in windows], group=group)
    for window, counts in zip(windows, zip(*every, strict=True), strict=True):
        window.close(max(counts))
