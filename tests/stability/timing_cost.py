"""What timing itself costs, measured on the ranks that do it."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from lightning_dcp.parallel.groups import ParallelGroups
from lightning_dcp.parallel.hop_times import HopRecorder


@dataclass(frozen=True)
class TimingCost:
    """Seconds of the host's thread.

    Attributes:
        hop_s: to note one hop.
        hop_end_s: what a hop adds to the end of its step.
        step_s: the end of a step without hops to speak of.
    """

    hop_s: float
    hop_end_s: float
    step_s: float

    def share(self, hops: int, seconds: float) -> float:
        """Of a step of so many hops and seconds, the part that timing takes."""
        return (self.step_s + hops * (self.hop_s + self.hop_end_s)) / seconds

    def __str__(self) -> str:
        return (
            f"timing takes {1e6 * self.hop_s:.1f} us a hop, {1e6 * self.hop_end_s:.1f} us more at the step's end, and "
            f"{1e3 * self.step_s:.2f} ms a step: {self.share(350, 1.0):.2%} of a second with 350 hops"
        )


def measure_timing_cost(groups: ParallelGroups, device: torch.device, hops: int = 2000) -> TimingCost:
    """Note hops that carry nothing, and tell the neighbours of them. Collective over the world; takes milliseconds.

    Args:
        groups: the process groups; the plane has two ranks or more.
        device: whose clock is used.
        hops: more of them give a steadier figure.
    """
    recorder = HopRecorder(groups, device)
    _step(groups, recorder, 1)  # the first messages between two ranks are slow
    least = _step(groups, recorder, 1)[1]
    noted, end = _step(groups, recorder, hops)
    return TimingCost(noted / hops, max(0.0, end - least) / hops, least)


def _step(groups: ParallelGroups, recorder: HopRecorder, hops: int) -> tuple[float, float]:
    """CPU seconds of noting hops around the plane, and of the step's end."""
    ranks, own = groups.plane_ranks, groups.rank
    previous, following = ranks[own - 1], ranks[(own + 1) % len(ranks)]
    recorder.begin_step()
    start = time.thread_time()
    for _ in range(hops):
        mark = recorder.hop_posted(previous, following, 8, 8)
        if mark is not None:
            mark.begins()
            mark.received()
            mark.ends()
    middle = time.thread_time()
    recorder.finish_step()
    return middle - start, time.thread_time() - middle
