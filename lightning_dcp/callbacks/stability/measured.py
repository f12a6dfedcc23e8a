"""The metrics of steadiness, fed with records of steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchmetrics import Metric

from lightning_dcp.metrics import EffectiveThroughput, HotSpots, PeakMemory, StepTimeWindow, TimeSplit
from lightning_dcp.parallel.hop_times import peak_memory
from lightning_dcp.stability.hot import by_kind, by_sample, critical_rank, excess_seconds, late_start
from lightning_dcp.stability.record import PackTime, StepRecord
from lightning_dcp.step.metric_state import StateSync

_ENOUGH = 10
"""Steps before one is called slow beside them."""
_LONG = 20_000
"""Last steps that the quantiles at the end are of."""


class Measured:
    """All metrics of a run. Records are the same on all ranks, so only memory is asked of them all.

    Args:
        ranks: of the plane.
        window: steps that quantiles and throughput are of.
        quantiles: of the step time; the median is always among them.
        top_k: hot samples and kinds that are kept.

    Attributes:
        whole_run: quantiles of the step time over the run (its last 20,000 steps).
        samples: the hottest of the run.
        kinds: as ``samples``, kinds of segments.
        slow: slow steps so far, those among them whose samples are not to blame: a rank began late.
    """

    def __init__(self, ranks: int, *, window: int, quantiles: Sequence[float], top_k: int) -> None:
        same: Any = {"sync_on_compute": False}
        self.step_time = StepTimeWindow(window, sorted({0.5, *quantiles}), **same)
        self.whole_run = StepTimeWindow(_LONG, self.step_time.quantiles, **same)
        self.throughput = EffectiveThroughput(window, **same)
        self.split = TimeSplit(ranks, **same)
        self.memory = PeakMemory(ranks)
        self.samples, self.kinds = HotSpots(top_k, **same), HotSpots(top_k, **same)
        self.slow = self._counted = 0
        self._late: deque[float] = deque(maxlen=window)

    def join(self, group: dist.ProcessGroup) -> None:
        """Let memory be gathered over a group that moves CPU tensors."""
        StateSync.install(self.memory, group)

    def release(self) -> None:
        """Let go of the group."""
        StateSync.remove(self.memory)

    def update(self, record: StepRecord, packs: Sequence[PackTime]) -> None:
        """Count a step.

        Args:
            record: the step.
            packs: its packs on all ranks.
        """
        if self._counted >= _ENOUGH:  # beside the steps before it
            self._blame(record, packs)
        self._late.append(_late_s(packs))
        for metric in (self.step_time, self.whole_run):
            metric.update(record.seconds)
        self.throughput.update(record.tokens, record.seconds)
        self.split.update({time.rank: (time.busy_s, time.transfer_s) for time in record.ranks}, record.seconds)
        self._counted += 1

    def _blame(self, record: StepRecord, packs: Sequence[PackTime]) -> None:
        excess, rank = excess_seconds(record, float(self.step_time.compute()["p50"])), critical_rank(record)
        if not excess or rank is None:
            return
        self.slow += 1
        if _late_s(packs) - median(self._late) >= excess / 2:
            return
        own = [pack for pack in packs if pack.rank == rank]
        self.samples.update(record.step, by_sample(own, excess))
        if any(pack.tokens_by_kind for pack in own):
            self.kinds.update(record.step, by_kind(own, excess))

    def values(self, place: int, device: torch.device) -> dict[str, Tensor]:
        """Scalars, by name, the same on all ranks; shares are of the steps since the last time. Collective.

        Args:
            place: of this rank in the plane.
            device: whose memory counts.
        """
        self.memory.update(place, peak_memory(device))
        shares = self.split.compute()
        self.split.reset()
        return {
            **{f"step_time_{name}": value for name, value in self.step_time.compute().items()},
            **{f"{kind}_share{worst}": shares[f"{kind}{worst}"] for kind in _KINDS for worst in ("", "_worst")},
            **self.throughput.compute(),
            "memory_max_gib": self.memory.compute().max() / (1 << 30),
        }

    def metrics(self) -> list[Metric]:
        """All of them."""
        return [m for m in vars(self).values() if isinstance(m, Metric)]


_KINDS = ("busy", "wait", "transfer")


def _late_s(packs: Sequence[PackTime]) -> float:
    """Seconds that the last rank began its packs after the first."""
    late = late_start(packs)
    return 0.0 if late is None else late[1]
