"""What slow steps have in common: the samples, or kinds of segments, with the most seconds to their name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_dcp.errors import ConfigurationError, Problem
from lightning_dcp.metrics.speed import non_negative

_KEPT = 32
"""Names kept for each one that is asked for: the last of them have next to no seconds."""


class HotSpot(NamedTuple):
    """One name among the hottest.

    Attributes:
        name: a sample's id, or a kind.
        seconds: that slow steps took longer, as far as they are owed to it.
        steps: slow steps that it was in.
        last_step: the last of these.
    """

    name: str | int
    seconds: float
    steps: int
    last_step: int


class HotSpots(Metric):
    """The names with the most excess seconds, over all ranks.

    Of very many names the coolest are forgotten on the way, so a name that collects its seconds a little at a time may be
    short of some.

    Args:
        top_k: names that are asked for.
        kwargs: as for every torchmetrics class.

    Returns:
        :class:`HotSpot` values, the hottest first.

    Raises:
        ConfigurationError: fewer than one.
    """

    full_state_update = False
    names: list[Tensor]
    totals: list[Tensor]

    def __init__(self, top_k: int = 10, **kwargs: Any) -> None:
        if top_k < 1:
            raise ConfigurationError([Problem(f"top_k={top_k}", "nothing to keep", "ask for 1 or more")])
        super().__init__(**kwargs)
        self.top_k = top_k
        self.add_state("names", [], dist_reduce_fx=None)  # each as JSON, in bytes
        self.add_state("totals", [], dist_reduce_fx=None)  # seconds, steps, last step

    def update(self, step: int, seconds: Mapping[Any, float]) -> None:
        """Count a slow step.

        Args:
            step: its number.
            seconds: the part of its excess that is owed to each name: a number or text, other names become text.

        Raises:
            ConfigurationError: a negative value.
        """
        non_negative(**{f"seconds[{name!r}]": value for name, value in seconds.items()})
        merged = self._merged()
        for name, value in seconds.items():
            key = json.dumps(name if isinstance(name, int | str) else str(name))
            before, steps, _ = merged.get(key, (0.0, 0, 0))
            merged[key] = (before + value, steps + 1, step)
        hottest = sorted(merged.items(), key=lambda item: -item[1][0])[: _KEPT * self.top_k]
        self.names = [torch.tensor(list(key.encode()), dtype=torch.uint8, device=self.device) for key, _ in hottest]
        self.totals = [torch.tensor(row, dtype=torch.float64, device=self.device) for _, row in hottest]

    def _merged(self) -> dict[str, tuple[float, int, int]]:
        """The rows by name; after a gathering, several ranks may have one of the same name."""
        merged: dict[str, tuple[float, int, int]] = {}
        for name, total in zip(self.names, self.totals, strict=True):
            key = bytes(name.tolist()).decode()
            seconds, steps, last = total.tolist()
            before, more, earlier = merged.get(key, (0.0, 0, 0))
            merged[key] = (before + seconds, more + int(steps), max(earlier, int(last)))
        return merged

    def compute(self) -> tuple[HotSpot, ...]:
        """The hottest since the last reset."""
        spots = [HotSpot(json.loads(key), *row) for key, row in self._merged().items()]
        return tuple(sorted(spots, key=lambda spot: (-spot.seconds, str(spot.name)))[: self.top_k])
