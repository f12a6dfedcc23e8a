"""How steady steps are: quantiles over a window, and the share of the possible throughput that is reached."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_dcp.errors import Problem, raise_problems
from lightning_dcp.metrics.speed import StepTime, non_negative


def window_problems(window: int) -> list[Problem]:
    """What is wrong with a number of steps."""
    if isinstance(window, int) and not isinstance(window, bool) and window >= 1:
        return []
    return [Problem(f"window={window!r}", "not a whole number of 1 or more", "give the number of steps, such as 200")]


class StepTimeWindow(StepTime):
    """Quantiles of the time of the last steps, and the highest of them over the lowest: 1 is perfectly steady.

    Over several ranks these are quantiles of the windows of all of them.

    Args:
        window: steps that are looked at.
        quantiles: which, between 0 and 1.
        kwargs: as for every torchmetrics class.

    Returns:
        A dict of float64 scalars: seconds by name (``p50``, ``p99``), and with several quantiles their ratio,
        ``p99_over_p50``; NaN before the first update.

    Raises:
        ConfigurationError: no quantile, one outside 0 to 1, a window of no steps.
    """

    def __init__(self, window: int = 200, quantiles: Sequence[float] = (0.5, 0.99), **kwargs: Any) -> None:
        raise_problems(window_problems(window))
        super().__init__(quantiles, **kwargs)
        self.window = window

    def update(self, seconds: float) -> None:
        """Count a step.

        Args:
            seconds: how long it took.

        Raises:
            ConfigurationError: a negative value.
        """
        super().update(seconds)
        del self.seconds[: -self.window]

    def compute(self) -> dict[str, Tensor]:
        """The quantiles of the window."""
        values = super().compute()
        low, high = (f"p{q * 100:g}" for q in (min(self.quantiles), max(self.quantiles)))
        return values if low == high else values | {f"{high}_over_{low}": values[high] / values[low]}


class EffectiveThroughput(Metric):
    """Tokens a second over all of the last steps' time, and how much of it unsteady steps cost.

    ``steadiness`` is ``median step time * steps / time of all steps``: the share of the throughput that would be reached if
    each step took the median. A tail of slow steps takes it below 1; where faster steps make up for the slow ones, it is 1.

    Args:
        window: steps that are looked at; None: all since the last reset.
        kwargs: as for every torchmetrics class.

    Returns:
        A dict of float64 scalars, ``tokens_per_second`` of all ranks and ``steadiness``; both 0 before the first update.

    Raises:
        ConfigurationError: a window of no steps.
    """

    full_state_update = False
    higher_is_better = True
    steps: list[Tensor]
    ranks: Tensor

    def __init__(self, window: int | None = 200, **kwargs: Any) -> None:
        raise_problems([] if window is None else window_problems(window))
        super().__init__(**kwargs)
        self.window = window
        self.add_state("steps", [], dist_reduce_fx="cat")
        self.add_state("ranks", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, tokens: int, seconds: float) -> None:
        """Count a step. Every rank calls it, also one that is responsible for no token.

        Args:
            tokens: that this rank is responsible for: each token of the batch on one rank.
            seconds: how long the step took.

        Raises:
            ConfigurationError: a negative value.
        """
        non_negative(tokens=tokens, seconds=seconds)
        self.steps.append(torch.tensor([[tokens, seconds]], dtype=torch.float64, device=self.device))
        self.ranks = torch.ones_like(self.ranks)
        if self.window is not None:
            del self.steps[: -self.window]

    def compute(self) -> dict[str, Tensor]:
        """Throughput and steadiness of the window."""
        rows = torch.cat(self.steps) if isinstance(self.steps, list) and self.steps else self.steps
        nothing = torch.zeros((), dtype=torch.float64, device=self.device)
        if not isinstance(rows, Tensor) or not (total := rows[:, 1].sum()) > 0:
            return {"tokens_per_second": nothing, "steadiness": nothing.clone()}
        median = torch.quantile(rows[:, 1], 0.5)
        return {
            "tokens_per_second": rows[:, 0].sum() * self.ranks / total,
            "steadiness": (median * len(rows) / total).clamp(max=1.0),
        }
