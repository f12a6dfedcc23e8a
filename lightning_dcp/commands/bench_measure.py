"""Plans many batches with every scheduler: how near to the lower bound they come, and how long planning takes."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_dcp.commands.bench_contenders import CONTENDERS, MODES, Outcomes, PeerLimit, ask
from lightning_dcp.commands.bench_workloads import Size, Workload
from lightning_dcp.commands.lengths import Lengths
from lightning_dcp.schedule.bound import lower_bound_s
from lightning_dcp.schedule.cost import CostModel
from lightning_dcp.schedule.plan import Mode, divisors

REPEAT_BELOW_S = 1.0
"""A plan made faster than this is made three times, and the median taken."""


@dataclass(frozen=True)
class ModeResult:
    """One scheduler on the batches of one size, in one mode.

    Attributes:
        ratios: predicted step time over the lower bound of the same batch, by batch; none that the scheduler refused.
        planning_s: seconds that each plan took.
        refusals: what the scheduler said about the batches that it refused.
    """

    ratios: tuple[float, ...]
    planning_s: tuple[float, ...]
    refusals: tuple[str, ...]

    @property
    def mean(self) -> float:
        """Mean ratio; not a number without one."""
        return statistics.fmean(self.ratios) if self.ratios else math.nan

    @property
    def worst(self) -> float:
        """Largest ratio; not a number without one."""
        return max(self.ratios, default=math.nan)

    @property
    def median_planning_s(self) -> float:
        """Median of the planning times; not a number without one."""
        return statistics.median(self.planning_s) if self.planning_s else math.nan


@dataclass(frozen=True)
class Quality:
    """One scheduler on the batches of one workload and size.

    Attributes:
        workload: its name.
        size: of the batches.
        scheduler: its name.
        draws: batches that were asked for.
        planned: batches that were planned or refused; fewer than ``draws`` where planning took too long.
        modes: the results.
    """

    workload: str
    size: Size
    scheduler: str
    draws: int
    planned: int
    modes: dict[Mode, ModeResult]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, with mean and maximum of the ratios."""
        values = dataclasses.asdict(self)
        for mode, result in self.modes.items():
            has_ratios = bool(result.ratios)
            values["modes"][mode] |= {
                "mean": result.mean if has_ratios else None,
                "max": result.worst if has_ratios else None,
            }
        return values


def measure_quality(
    workload: Workload, size: Size, schedulers: Sequence[str], draws: int, seed: int, cost: CostModel, limit: PeerLimit
) -> Iterator[Quality]:
    """One :class:`Quality` for each scheduler, on the same batches.

    Args:
        workload: where the batches come from.
        size: of the batches.
        schedulers: names in :data:`CONTENDERS`.
        draws: how many batches.
        seed: of the draws.
        cost: what packs cost.
        limit: which peers are too slow.
    """
    batches = workload.batches(size, draws, seed)
    bounds = [{mode: bound_of(size, lengths, cost, mode) for mode in MODES} for lengths in batches]
    for name in schedulers:
        outcomes = []
        for lengths in batches:
            outcome = ask(name, size, lengths, cost, limit)
            if outcome is None:
                break
            outcomes.append(outcome)
        modes = {mode: _mode_result(outcomes, bounds, mode) for mode in MODES}
        yield Quality(workload.name, size, name, len(batches), len(outcomes), modes)


def bound_of(size: Size, lengths: Lengths, cost: CostModel, mode: Mode) -> float:
    """Seconds that no plan at all of this batch can beat."""
    limit = size.max_seqlen_per_dp_cp_rank
    return lower_bound_s(lengths, size.ranks, limit, cost, sizes=divisors(size.ranks), mode=mode)


def _mode_result(outcomes: Sequence[Outcomes], bounds: Sequence[dict[Mode, float]], mode: Mode) -> ModeResult:
    found = [(outcome[mode], bound[mode]) for outcome, bound in zip(outcomes, bounds, strict=False)]
    return ModeResult(
        tuple(outcome.step_s / bound for outcome, bound in found if outcome.step_s is not None),
        tuple(outcome.planning_s for outcome, _ in found if outcome.step_s is not None),
        tuple(outcome.refusal for outcome, _ in found if outcome.step_s is None),
    )


# ------------------------------------------------------------------------- speed


@dataclass(frozen=True)
class Speed:
    """How long one scheduler plans a batch.

    Attributes:
        size: of the batch.
        scheduler: its name.
        planning_s: seconds by mode; ``None``: refused, or not asked as it would take too long.
        skipped: whether it was not asked.
        growth: by mode, p of planning time ~ samples^p from the next smaller batch for as many ranks.
    """

    size: Size
    scheduler: str
    planning_s: dict[Mode, float | None]
    skipped: bool = False
    growth: dict[Mode, float | None] = dataclasses.field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return dataclasses.asdict(self)


def measure_speed(
    workload: Workload, size: Size, name: str, seed: int, cost: CostModel, limit: PeerLimit, earlier: Sequence[Speed]
) -> Speed:
    """Time one plan for each mode: once, or the median of three where that is quick.

    Args:
        workload: where the batch comes from.
        size: of the batch.
        name: of the scheduler, in :data:`CONTENDERS`.
        seed: of the draw.
        cost: what packs cost.
        limit: which peers are too slow.
        earlier: what was measured before, to tell growth.
    """
    (lengths,) = workload.batches(size, 1, seed)
    first = ask(name, size, lengths, cost, limit)
    if first is None:
        return Speed(size, name, dict.fromkeys(MODES), skipped=True)
    quick = max(outcome.planning_s for outcome in first.values()) < REPEAT_BELOW_S
    runs = [first] + [CONTENDERS[name](size, lengths, cost) for _ in range(2 if quick else 0)]
    seconds: dict[Mode, float | None] = {}
    for mode in MODES:
        refused = any(run[mode].step_s is None for run in runs)
        seconds[mode] = None if refused else statistics.median(run[mode].planning_s for run in runs)
    return Speed(size, name, seconds, growth={mode: _growth(size, name, mode, seconds, earlier) for mode in MODES})


def _growth(
    size: Size, name: str, mode: Mode, seconds: dict[Mode, float | None], earlier: Sequence[Speed]
) -> float | None:
    """The exponent between this batch and the next smaller one on the same plane."""
    before = [
        (other.size.samples, other.planning_s[mode])
        for other in earlier
        if other.scheduler == name and other.size.ranks == size.ranks and other.size.samples < size.samples
    ]
    samples, old = max(before, default=(0, None))
    new = seconds[mode]
    if not old or not new:
        return None
    return math.log(new / old) / math.log(size.samples / samples)
