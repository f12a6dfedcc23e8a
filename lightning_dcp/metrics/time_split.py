"""How each rank's time goes, and the memory it takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_dcp.errors import ConfigurationError, Problem, raise_problems
from lightning_dcp.metrics.speed import non_negative

_BUSY, _TRANSFER, _ALL = range(3)


class _ByRank(Metric):
    """One row of float64 values a rank."""

    full_state_update = False
    values: Tensor

    def __init__(self, ranks: int, columns: int, reduction: Literal["sum", "max"], **kwargs: Any) -> None:
        remedy = "give the number of ranks of the plane"
        raise_problems([] if ranks >= 1 else [Problem(f"ranks={ranks}", "no rank to measure", remedy)])
        super().__init__(**kwargs)
        self.add_state("values", torch.zeros(ranks, columns, dtype=torch.float64), dist_reduce_fx=reduction)

    def _check(self, rank: int) -> None:
        if not 0 <= rank < len(self.values):
            remedy = "give places in the plane, from 0"
            raise ConfigurationError([Problem(f"rank={rank}", f"a plane of {len(self.values)} rank(s)", remedy)])


class TimeSplit(_ByRank):
    """The shares of each rank's time that it computes, waits for other ranks, and waits for what is on its way.

    A rank waits for others until they begin to send, and once it is through with its own packs; so the three add up to 1.

    Args:
        ranks: of the plane.
        kwargs: as for every torchmetrics class.

    Returns:
        A dict of float64 scalars between 0 and 1: ``busy``, ``wait`` and ``transfer``, means over the ranks, and of the rank
        where each is worst ``busy_worst`` (the least), ``wait_worst`` and ``transfer_worst`` (the most). All are 0 before the
        first update.

    Raises:
        ConfigurationError: no ranks.
    """

    def __init__(self, ranks: int, **kwargs: Any) -> None:
        super().__init__(ranks, 3, "sum", **kwargs)

    def update(self, times: Mapping[int, tuple[float, float]], seconds: float) -> None:
        """Count one step, of the ranks that this process speaks for.

        Args:
            times: by place in the plane, the seconds that the rank computed and those that it waited for what was on its way.
            seconds: of the step.

        Raises:
            ConfigurationError: a negative value, an unknown rank.
        """
        non_negative(seconds=seconds)
        for rank, (busy, transfer) in times.items():
            self._check(rank)
            non_negative(busy=busy, transfer=transfer)
        rows = [[*times[rank], seconds] if rank in times else [0.0] * 3 for rank in range(len(self.values))]
        self.values = self.values + self.values.new_tensor(rows)

    def shares(self) -> Tensor:
        """Busy, wait and transfer of each rank: ``[ranks, 3]``, of what this process counted."""
        whole = self.values[:, _ALL]
        busy, transfer = (
            torch.where(whole > 0, self.values[:, column] / whole, 0.0).clamp(max=1.0) for column in (_BUSY, _TRANSFER)
        )
        wait = torch.where(whole > 0, (1 - busy - transfer).clamp(min=0.0), 0.0)
        return torch.stack([busy, wait, transfer], 1)

    def compute(self) -> dict[str, Tensor]:
        """Means and worst ranks since the last reset."""
        busy, wait, transfer = self.shares().unbind(1)
        means = {"busy": busy.mean(), "wait": wait.mean(), "transfer": transfer.mean()}
        return means | {"busy_worst": busy.min(), "wait_worst": wait.max(), "transfer_worst": transfer.max()}


class PeakMemory(_ByRank):
    """The most memory that each rank has used.

    Args:
        ranks: of the plane.
        kwargs: as for every torchmetrics class.

    Returns:
        float64 ``[ranks]``, bytes; 0 for ranks that were never counted.

    Raises:
        ConfigurationError: no ranks.
    """

    higher_is_better = False

    def __init__(self, ranks: int, **kwargs: Any) -> None:
        super().__init__(ranks, 1, "max", **kwargs)

    def update(self, rank: int, num_bytes: int) -> None:
        """Count one rank.

        Args:
            rank: its place in the plane.
            num_bytes: its peak so far, such as of :func:`~lightning_dcp.stability.memory.peak_memory_bytes`.

        Raises:
            ConfigurationError: a negative value, an unknown rank.
        """
        non_negative(num_bytes=num_bytes)
        self._check(rank)
        self.values[rank].clamp_(min=num_bytes)

    def compute(self) -> Tensor:
        """The peaks since the last reset."""
        return self.values[:, 0].clone()
