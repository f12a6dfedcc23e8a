"""Tokens a second, and how long steps take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_dcp.errors import Problem, raise_problems


def non_negative(**values: float) -> None:
    """Refuse negative and undefined measurements.

    Raises:
        ConfigurationError: names each value that is negative or NaN.
    """
    remedy = "give a measured time in seconds, or a count, of 0 or more"
    raise_problems([Problem(f"{n}={v}", "not a number of 0 or more", remedy) for n, v in values.items() if not v >= 0])


def quantile_problems(quantiles: Sequence[float]) -> list[Problem]:
    """What is wrong with quantiles."""
    if quantiles and all(0 <= q <= 1 for q in quantiles):
        return []
    remedy = "give numbers between 0 and 1, such as (0.5, 0.99)"
    return [Problem(f"quantiles={list(quantiles)}", "no shares of the steps", remedy)]


class TokenThroughput(Metric):
    """Tokens a second over all ranks.

    The tokens that ranks report are added up; the time is that of the slowest rank, as all take part in each step.

    Args:
        kwargs: as for every torchmetrics class (``sync_on_compute`` and so on).

    Returns:
        float64 scalar, tokens/s; 0 before the first update.

    Example:
        >>> metric = TokenThroughput()
        >>> metric.update(tokens=3000, seconds=2.0)
        >>> metric.compute()
        tensor(1500., dtype=torch.float64)
    """

    full_state_update = False
    higher_is_better = True
    tokens: Tensor
    seconds: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("tokens", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("seconds", torch.zeros((), dtype=torch.float64), dist_reduce_fx="max")

    def update(self, tokens: int, seconds: float) -> None:
        """Count a step.

        Args:
            tokens: tokens that this rank is responsible for: each token of the batch on one rank.
            seconds: how long the step took.

        Raises:
            ConfigurationError: a negative value.
        """
        non_negative(tokens=tokens, seconds=seconds)
        self.tokens, self.seconds = self.tokens + tokens, self.seconds + seconds

    def compute(self) -> Tensor:
        """Tokens a second since the last reset."""
        return torch.where(self.seconds > 0, self.tokens / self.seconds, 0.0)


class StepTime(Metric):
    """Quantiles of the time that steps take: the median, and the 99th percentile, which shows stragglers.

    Over several ranks these are quantiles of the times of all of them. Between two measured times a quantile is
    interpolated linearly, as in ``torch.quantile``.

    Args:
        quantiles: which, between 0 and 1.
        kwargs: as for every torchmetrics class.

    Returns:
        A dict of float64 scalars in seconds, by name: ``p50``, ``p99``, ``p99.9``; NaN before the first update.

    Raises:
        ConfigurationError: no quantile, or one outside 0 to 1.
    """

    full_state_update = False
    higher_is_better = False
    seconds: list[Tensor]

    def __init__(self, quantiles: Sequence[float] = (0.5, 0.99), **kwargs: Any) -> None:
        super().__init__(**kwargs)
        raise_problems(quantile_problems(quantiles))
        self.quantiles = tuple(quantiles)
        self.add_state("seconds", [], dist_reduce_fx="cat")

    def update(self, seconds: float) -> None:
        """Count a step.

        Args:
            seconds: how long it took.

        Raises:
            ConfigurationError: a negative value.
        """
        non_negative(seconds=seconds)
        self.seconds.append(torch.tensor([seconds], dtype=torch.float64, device=self.device))

    def compute(self) -> dict[str, Tensor]:
        """The quantiles since the last reset."""
        every = torch.cat(self.seconds) if isinstance(self.seconds, list) and self.seconds else self.seconds
        if not isinstance(every, Tensor):
            every = torch.full((1,), torch.nan, dtype=torch.float64, device=self.device)
        return {f"p{q * 100:g}": torch.quantile(every, q) for q in self.quantiles}
