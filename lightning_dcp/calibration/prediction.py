"""How well a cost model foretells measured steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_dcp.schedule.cost import CostModel
from lightning_dcp.schedule.plan import StepPlan
from lightning_dcp.schedule.simulate import simulate


@dataclass(frozen=True)
class Prediction:
    """One batch.

    Attributes:
        plan: by which it ran.
        predicted: seconds of the step by the cost model.
        measured: seconds of the step, the median of several.
    """

    plan: StepPlan
    predicted: float
    measured: float

    @property
    def packs_by_size(self) -> dict[int, int]:
        """How many packs have each CP size, ascending."""
        return dict(sorted(Counter(pack.cp_size for pack in self.plan.packs()).items()))

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        packs = {str(size): count for size, count in self.packs_by_size.items()}
        lengths = list(self.plan.lengths)
        return {"lengths": lengths, "packs": packs, "predicted_s": self.predicted, "measured_s": self.measured}


@dataclass(frozen=True)
class Agreement:
    """All batches together.

    Attributes:
        predictions: one a batch.
    """

    predictions: tuple[Prediction, ...]

    @property
    def predicted(self) -> NDArray[np.float64]:
        """Seconds of each batch by the cost model."""
        return np.array([p.predicted for p in self.predictions])

    @property
    def measured(self) -> NDArray[np.float64]:
        """Seconds of each batch as measured."""
        return np.array([p.measured for p in self.predictions])

    @property
    def correlation(self) -> float:
        """Pearson's; not a number if all batches take equally long."""
        if min(self.predicted.std(), self.measured.std()) == 0:
            return float("nan")
        return float(np.corrcoef(self.predicted, self.measured)[0, 1])

    @property
    def mean_ratio(self) -> float:
        """The mean of measured over predicted."""
        return float((self.measured / self.predicted).mean())

    @property
    def median_error(self) -> float:
        """The median of how far predictions are off, as a share of the measured time."""
        return float(np.median(np.abs(self.predicted / self.measured - 1)))

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "correlation": self.correlation,
            "mean_ratio": self.mean_ratio,
            "median_relative_error": self.median_error,
            "batches": [p.to_dict() for p in self.predictions],
        }


def predict(
    plans: Sequence[StepPlan], measured: Sequence[float], cost: CostModel, speeds: Sequence[float] | None = None
) -> Agreement:
    """Set the simulated seconds of plans beside the measured ones.

    Args:
        plans: one a batch.
        measured: seconds of each batch's step.
        cost: what packs cost.
        speeds: speed of each rank, by default all alike.
    """
    pairs = zip(plans, measured, strict=True)
    return Agreement(tuple(Prediction(plan, simulate(plan, cost, speeds).step_s, seconds) for plan, seconds in pairs))
