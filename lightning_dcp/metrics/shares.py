"""Which part of the ranks' time, and of the tokens they compute, is of use."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_dcp.errors import ConfigurationError, Problem
from lightning_dcp.metrics.speed import non_negative


class BusyShare(Metric):
    """The part of all ranks' time that they compute instead of waiting for each other: 1 is a perfect balance.

    Args:
        kwargs: as for every torchmetrics class.

    Returns:
        float64 scalar between 0 and 1; 0 before the first update.
    """

    full_state_update = False
    higher_is_better = True
    busy: Tensor
    available: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        for name in ("busy", "available"):
            self.add_state(name, torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, busy: float, seconds: float) -> None:
        """Count one rank during one step.

        Args:
            busy: seconds that the rank computed.
            seconds: seconds that the step took on the slowest rank.

        Raises:
            ConfigurationError: a negative value.
        """
        non_negative(busy=busy, seconds=seconds)
        self.busy, self.available = self.busy + busy, self.available + seconds

    def compute(self) -> Tensor:
        """The share since the last reset."""
        return torch.where(self.available > 0, self.busy / self.available, 0.0)


class PaddingShare(Metric):
    """The part of the computed tokens that are padding or fill, and of no use.

    Args:
        kwargs: as for every torchmetrics class.

    Returns:
        float64 scalar between 0 and 1; 0 before the first update.

    Example:
        >>> metric = PaddingShare()
        >>> metric.update(real=30, computed=40)
        >>> metric.compute()
        tensor(0.2500, dtype=torch.float64)
    """

    full_state_update = False
    higher_is_better = False
    real: Tensor
    computed: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        for name in ("real", "computed"):
            self.add_state(name, torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, real: int, computed: int) -> None:
        """Count a step, a batch or a pack.

        Args:
            real: tokens of samples.
            computed: tokens that went through the model, padding included.

        Raises:
            ConfigurationError: a negative value, or fewer tokens computed than there are.
        """
        non_negative(real=real, computed=computed)
        if computed < real:
            found, remedy = f"only {computed} computed", "count padding in computed, not in real"
            raise ConfigurationError([Problem(f"{real} real tokens", found, remedy)])
        self.real, self.computed = self.real + real, self.computed + computed

    def compute(self) -> Tensor:
        """The share since the last reset."""
        return torch.where(self.computed > 0, 1 - self.real / self.computed, 0.0)
