"""The layouts of all packs of a plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lightning_dcp.boundaries.budget import BoundaryBudget
from lightning_dcp.boundaries.budgeted import budgeted
from lightning_dcp.boundaries.greedy import greedy
from lightning_dcp.boundaries.pieces import PackSegments
from lightning_dcp.errors import PlanError
from lightning_dcp.parallel.layout import BUDGETED, PackLayout, build_layout
from lightning_dcp.schedule.cost import CostModel
from lightning_dcp.schedule.plan import Pack, StepPlan

Preferred = Callable[[Pack], Sequence[int]]
"""The places of a pack's group for its densest shards, densest first."""
GREEDY = "greedy"
"""The baseline that :func:`~lightning_dcp.boundaries.greedy.greedy` is, by name."""
FROM_SEGMENTS = (BUDGETED, GREEDY)
"""Layouts that are made from segments; all others, from lengths alone."""


def pack_segments(pack: Pack, segments: PackSegments) -> PackSegments:
    """The segments of a pack's samples, out of those of the batch."""
    return None if segments is None else [segments[sample] for sample in pack.samples]


def pack_layouts(
    plan: StepPlan,
    segments: PackSegments,
    budget: BoundaryBudget,
    cost: CostModel | None = None,
    *,
    preferred: Preferred | None = None,
) -> tuple[PackLayout, ...]:
    """The layout of each pack, in the plan's order, by the name that the plan gives it.

    Args:
        plan: a valid plan.
        segments: of each sample of the batch; None: plain samples.
        budget: of each shard; no more than the plan gives a rank.
        cost: how much linear layers and attention cost.
        preferred: where the densest shards of a budgeted pack go.

    Raises:
        PlanError: an unknown layout; a budgeted one in a plan with padding; segments of other samples.
    """
    within = budget.within(plan.max_seqlen_per_dp_cp_rank)
    if segments is not None and len(segments) != len(plan.lengths):
        raise PlanError(f"segments of {len(segments)} sample(s) for a batch of {len(plan.lengths)}")
    return tuple(_layout(plan, pack, segments, within, cost, preferred) for pack in plan.packs())


def _layout(
    plan: StepPlan,
    pack: Pack,
    segments: PackSegments,
    budget: BoundaryBudget,
    cost: CostModel | None,
    preferred: Preferred | None,
) -> PackLayout:
    lengths = [plan.lengths[sample] for sample in pack.samples]
    if pack.layout not in FROM_SEGMENTS:
        padded = pack.padded_lengths(plan.lengths, plan.alignment)
        return build_layout(pack.layout, padded, pack.cp_size).without_padding(lengths)
    if plan.alignment:
        raise PlanError(f"layout {pack.layout!r} cuts at segments, not to multiples: {plan.alignment} needs another")
    own = pack_segments(pack, segments)
    if pack.layout == GREEDY:
        return greedy(lengths, pack.cp_size, own, budget)
    places = () if preferred is None else preferred(pack)
    return budgeted(lengths, pack.cp_size, own, budget, cost, preferred=places)
