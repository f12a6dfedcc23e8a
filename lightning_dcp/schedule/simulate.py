"""How long a plan takes by a cost model: when each pack starts and ends on its ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_dcp.schedule.cost import CostModel
from lightning_dcp.schedule.plan import Pack, StepPlan


@dataclass(frozen=True)
class PackRun:
    """One pack in time.

    Attributes:
        pack: the pack.
        microbatch: number of its round.
        start: seconds from the start of the step.
        end: as ``start``.
    """

    pack: Pack
    microbatch: int
    start: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """A plan in time.

    Attributes:
        ranks: size of the plane.
        runs: all packs, in the plan's order.
    """

    ranks: int
    runs: tuple[PackRun, ...]

    @property
    def step_s(self) -> float:
        """Seconds until the last rank is done."""
        return max((run.end for run in self.runs), default=0.0)

    @property
    def busy_share(self) -> float:
        """Part of the time of all ranks in which they work on packs; waiting for a slower rank of the group counts."""
        busy = sum((run.end - run.start) * run.pack.cp_size for run in self.runs)
        return busy / (self.ranks * self.step_s) if self.step_s else 0.0


def simulate(plan: StepPlan, cost: CostModel, speeds: Sequence[float] | None = None) -> Simulation:
    """Run a plan on paper.

    A pack starts when all ranks of its group are done with their earlier packs; in lock-step, when all ranks of the
    plane are done with the round before. A group is as fast as its slowest rank.

    Args:
        plan: a valid plan.
        cost: what packs cost.
        speeds: speed of each rank, 1.0 being the cost model's; by default all 1.0.
    """
    free = [0.0] * plan.ranks
    runs = []
    for number, microbatch in enumerate(plan.microbatches):
        if plan.mode == "lockstep":
            free = [max(free)] * plan.ranks
        for pack in microbatch:
            start = max(free[pack.first_rank : pack.first_rank + pack.cp_size])
            seconds = _pack_seconds(plan, pack, cost)
            if speeds is not None:
                seconds /= min(speeds[rank] for rank in pack.ranks)
            end = start + seconds
            free[pack.first_rank : pack.first_rank + pack.cp_size] = [end] * pack.cp_size
            runs.append(PackRun(pack, number, start, end))
    return Simulation(plan.ranks, tuple(runs))


def _pack_seconds(plan: StepPlan, pack: Pack, cost: CostModel) -> float:
    """Seconds of a pack at speed 1; samples count with their padding, and so does the pack's own."""
    lengths = [plan.alignment.padded(plan.lengths[s], pack.cp_size) for s in pack.samples]
    padding = plan.alignment.in_pack(sum(lengths), pack.cp_size) - sum(lengths)
    return cost.pack_seconds(lengths, pack.cp_size, pack.first_rank, padding=padding)
