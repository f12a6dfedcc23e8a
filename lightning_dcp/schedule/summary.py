"""What a plan amounts to, in a few numbers: its time, how busy the ranks are, what it costs in padding."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lightning_dcp.errors import PlanError
from lightning_dcp.schedule.cost import CostModel
from lightning_dcp.schedule.plan import StepPlan
from lightning_dcp.schedule.simulate import simulate


@dataclass(frozen=True)
class PlanSummary:
    """The numbers of one plan, or their mean over several batches (:func:`mean_summary`).

    Padding: the layouts of this package pad nothing, whatever the lengths, since the chunks of a sample need not be of
    equal size; plans for a back end that needs padding say so. What a backend that wants equal chunks would add is
    counted on its own, and so is the room that packs leave below the token limit: it costs no time, since nobody
    computes on it.

    Attributes:
        predicted_step_s: seconds of the step by the cost model.
        lower_bound_s: seconds that no plan of this batch can beat.
        busy_share: part of the time of all ranks in which they work on packs, 0 to 1.
        tokens: of the whole batch.
        padding: tokens that the plan's own alignment adds to its samples and packs.
        padding_to_multiples: tokens that a backend adds that pads each sample to a multiple of 2 x CP size, as
            Transformer Engine's ring attention needs; a pack on one rank is not padded.
        capacity: tokens that the plan's packs could hold: ranks x ``max_seqlen_per_dp_cp_rank``, over all packs.
        packs_by_cp_size: number of packs of each CP size, by size ascending.
        microbatches: number of rounds.
        tokens_per_rank_min: tokens of the rank with the fewest, over all its packs, each shared evenly by its group.
        tokens_per_rank_max: as before, of the rank with the most.
        planning_s: seconds that making the plan took.
    """

    predicted_step_s: float
    lower_bound_s: float
    busy_share: float
    tokens: float
    padding: float
    padding_to_multiples: float
    capacity: float
    packs_by_cp_size: dict[int, float]
    microbatches: float
    tokens_per_rank_min: float
    tokens_per_rank_max: float
    planning_s: float

    @property
    def share_of_lower_bound(self) -> float:
        """Lower bound over predicted time: 1.0 is a plan that cannot be improved."""
        return self.lower_bound_s / self.predicted_step_s if self.predicted_step_s else 1.0

    @property
    def padding_share(self) -> float:
        """Padding to multiples of 2 x CP size, as a share of the tokens."""
        return self.padding_to_multiples / self.tokens

    @property
    def fill(self) -> float:
        """Part of the packs' capacity that holds tokens."""
        return self.tokens / self.capacity

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, shares included; CP sizes become text, as JSON has it."""
        sizes = {str(size): count for size, count in self.packs_by_cp_size.items()}
        shares = {name: getattr(self, name) for name in ("share_of_lower_bound", "padding_share", "fill")}
        return asdict(self) | {"packs_by_cp_size": sizes} | shares


def summarize(
    plan: StepPlan,
    cost: CostModel,
    *,
    lower_bound_s: float,
    planning_s: float = 0.0,
    speeds: Sequence[float] | None = None,
) -> PlanSummary:
    """Count and simulate one plan.

    Args:
        plan: a valid plan.
        cost: what packs cost.
        lower_bound_s: from :func:`~lightning_dcp.schedule.bound.lower_bound_s`, for all CP sizes that the plan may use.
        planning_s: seconds that making the plan took.
        speeds: speed of each rank, 1.0 being the cost model's; by default all 1.0.
    """
    simulation = simulate(plan, cost, speeds)
    sizes = Counter(pack.cp_size for pack in plan.packs())
    tokens = _tokens_by_rank(plan)
    return PlanSummary(
        predicted_step_s=simulation.step_s,
        lower_bound_s=lower_bound_s,
        busy_share=simulation.busy_share,
        tokens=sum(plan.lengths),
        padding=sum(plan.padding(pack) for pack in plan.packs()),
        padding_to_multiples=_padding_to_multiples(plan),
        capacity=sum(size * count for size, count in sizes.items()) * plan.max_seqlen_per_dp_cp_rank,
        packs_by_cp_size={size: sizes[size] for size in sorted(sizes)},
        microbatches=len(plan.microbatches),
        tokens_per_rank_min=min(tokens),
        tokens_per_rank_max=max(tokens),
        planning_s=planning_s,
    )


def mean_summary(summaries: Sequence[PlanSummary]) -> PlanSummary:
    """The mean of each number over the plans of several batches; the busy share weighs each by its step's time.

    Raises:
        PlanError: there are none.
    """
    if not summaries:
        raise PlanError("the mean of no plans: give at least one")
    numbers = [asdict(summary) for summary in summaries]
    means = {
        name: _mean([values[name] for values in numbers])
        for name in numbers[0]
        if name not in ("packs_by_cp_size", "busy_share")
    }
    sizes = sorted({size for summary in summaries for size in summary.packs_by_cp_size})
    packs = {size: _mean([summary.packs_by_cp_size.get(size, 0) for summary in summaries]) for size in sizes}
    total = math.fsum(summary.predicted_step_s for summary in summaries)
    busy = math.fsum(summary.busy_share * summary.predicted_step_s for summary in summaries)
    return PlanSummary(**means, packs_by_cp_size=packs, busy_share=busy / total if total else 0.0)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _tokens_by_rank(plan: StepPlan) -> list[float]:
    tokens = [0.0] * plan.ranks
    for pack in plan.packs():
        share = pack.tokens(plan.lengths) / pack.cp_size
        for rank in pack.ranks:
            tokens[rank] += share
    return tokens


def _padding_to_multiples(plan: StepPlan) -> int:
    cut = [pack for pack in plan.packs() if pack.cp_size > 1]
    return sum(-plan.lengths[sample] % (2 * pack.cp_size) for pack in cut for sample in pack.samples)
