"""Another plan for a batch whose packs hold more than their shards may."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from lightning_dcp.boundaries.budget import BoundaryBudget
from lightning_dcp.boundaries.layouts import pack_layouts
from lightning_dcp.boundaries.pieces import PackSegments, Work, default_cost, pieces_of, shard_loads
from lightning_dcp.errors import ConfigurationError, PlanError
from lightning_dcp.parallel.layout import BUDGETED
from lightning_dcp.schedule.cost import CostModel
from lightning_dcp.schedule.dynamic import DynamicScheduler
from lightning_dcp.schedule.plan import Pack, Scheduler, StepPlan, divisors, in_rounds
from lightning_dcp.schedule.simulate import simulate
from lightning_dcp.schedule.static import StaticScheduler

SHARES = (1.0, 0.5, 0.25, 0.125)
"""Of the tokens that a rank may hold: what schedulers are given, one after the other, to make smaller packs."""
GOOD = 1.1
"""A plan that takes no longer than this, beside the one that breaks the budgets, is good enough to look no further."""


class Replanned(NamedTuple):
    """Another plan, and in words how it came about."""

    plan: StepPlan
    how: str


@dataclass(frozen=True)
class Replanning:
    """What another plan has to keep, beside the rules of all plans.

    Attributes:
        segments: of each sample of the batch.
        budget: of each shard.
        given_cost: what packs cost; None: the default.
        given_sizes: the CP sizes that may be used; None: all that the plane offers.
        microbatch_multiple: of the number of micro-batches, in lock-step.
        speeds: of the plane's ranks.
    """

    segments: PackSegments
    budget: BoundaryBudget
    given_cost: CostModel | None = None
    given_sizes: Sequence[int] | None = None
    microbatch_multiple: int = 1
    speeds: Sequence[float] | None = None

    @cached_property
    def cost(self) -> CostModel:
        """What packs cost."""
        return default_cost() if self.given_cost is None else self.given_cost

    def sizes(self, plan: StepPlan) -> list[int]:
        """The CP sizes that may be used, ascending."""
        allowed = divisors(plan.ranks) if self.given_sizes is None else self.given_sizes
        return [size for size in divisors(plan.ranks) if size in allowed]

    def seconds(self, plan: StepPlan) -> float:
        """Predicted time of a step."""
        return simulate(plan, self.cost, self.speeds).step_s


def impossible(plan: StepPlan, options: Replanning) -> frozenset[int]:
    """Samples of packs over their budgets that are over them even alone, whatever the CP size."""
    dense = _dense_tokens(plan, options)
    broken = [pack for pack in plan.packs() if not _pack_fits(plan, pack, options, dense)]
    return frozenset(s for pack in broken for s in pack.samples if not _sizes_alone(plan, pack, s, options, dense))


def replanned(plan: StepPlan, options: Replanning, hopeless: frozenset[int] = frozenset()) -> Replanned | None:
    """The fastest plan that was found whose shards keep their budgets; None if none was, or if there
    is no pack to mend.

    Packs with ``hopeless`` samples (:func:`impossible`) may break their budgets, if the rest of the pack would keep them.

    Packs that hold too much are split, their groups enlarged where a sample needs it (with free-running ranks only: in
    lock-step that would leave ranks without work). If that costs much, or cannot be done, the whole batch is planned again:
    dynamically with larger and larger smallest groups, and at each fixed size, with fewer and fewer tokens a rank.
    """
    dense = _dense_tokens(plan, options)
    free_of = [pack for pack in plan.packs() if hopeless.isdisjoint(pack.samples)]
    if all(_pack_fits(plan, pack, options, dense) for pack in free_of):
        return None
    found: list[tuple[float, int, Replanned]] = []
    enough = GOOD * options.seconds(plan)
    for share, candidates in _rounds_of_candidates(plan, options, dense, hopeless):
        for candidate in candidates:
            if _keeps(candidate.plan, options, dense, hopeless):
                found.append((options.seconds(candidate.plan), len(found), candidate))
        if found and (share < 1.0 or min(found)[0] <= enough):
            break
    if not found:
        return None
    seconds, _, best = min(found, key=lambda way: way[:2])
    extra = plan.extra | {"cost_model": options.cost.to_dict(), "predicted_step_s": seconds}
    return best._replace(plan=replace(best.plan, extra=extra))


def _dense_tokens(plan: StepPlan, options: Replanning) -> list[int]:
    """Dense tokens of each sample of the batch."""
    dense = [0] * len(plan.lengths)
    for piece in pieces_of(plan.lengths, options.segments, options.budget):
        dense[piece.sample] += piece.num_tokens if piece.dense else 0
    return dense


def _rounds_of_candidates(
    plan: StepPlan, options: Replanning, dense: Sequence[int], hopeless: frozenset[int]
) -> Iterator[tuple[float, Iterator[Replanned]]]:
    """Other plans, the likeliest first, with the share of tokens they are for; those of a round are compared."""
    if plan.mode == "free":
        yield 1.0, _split(plan, options, dense, hopeless)
    for share in SHARES:
        yield share, _scheduled(plan, options, share)


# ------------------------------------------------------------------- splitting packs


def _split(plan: StepPlan, options: Replanning, dense: Sequence[int], hopeless: frozenset[int]) -> Iterator[Replanned]:
    packs: list[Pack] = []
    split = grown = 0
    for pack in plan.packs():
        rest = _without(pack, hopeless)
        if _pack_fits(plan, rest, options, dense):
            packs.append(pack)
            continue
        parts = _mended(plan, rest, options, dense)
        left = tuple(s for s in pack.samples if s in hopeless)
        packs += [*([replace(pack, samples=left)] if left else []), *parts]
        split += len(parts) + bool(left) > 1
        grown += any(part.cp_size > pack.cp_size for part in parts)
    how = f"{split} pack(s) were split, {grown} got larger groups"
    yield Replanned(replace(plan, microbatches=in_rounds(packs, plan.ranks)), how)


def _without(pack: Pack, hopeless: frozenset[int]) -> Pack:
    return replace(pack, samples=tuple(s for s in pack.samples if s not in hopeless))


def _mended(plan: StepPlan, pack: Pack, options: Replanning, dense: Sequence[int]) -> list[Pack]:
    """A pack in parts that keep their budgets: on groups of one size where one does for all samples, else each sample alone."""
    alone = [_sizes_alone(plan, pack, sample, options, dense) for sample in pack.samples]
    size = next((c for c in options.sizes(plan) if c >= pack.cp_size and all(c in fit for fit in alone)), 0)
    if size:
        return _parts(plan, pack, size, options, dense)
    # A sample has no size if it came from a pack that fits only as a whole; such a plan is not kept.
    return [_around(pack, min(fit, default=pack.cp_size), (s,)) for s, fit in zip(pack.samples, alone, strict=True)]


def _around(pack: Pack, size: int, samples: tuple[int, ...]) -> Pack:
    """Samples on the group of ``size`` around a pack's own."""
    return Pack(pack.first_rank - pack.first_rank % size, size, samples, pack.layout)


def _room(plan: StepPlan, size: int, budget: BoundaryBudget) -> tuple[int, float]:
    """Tokens and dense tokens that a group may hold."""
    most = budget.within(plan.max_seqlen_per_dp_cp_rank).max_tokens or 0
    tokens = plan.alignment.limit(most) * size
    return tokens, float("inf") if budget.dense_limit is None else budget.dense_limit * size


def _held(plan: StepPlan, samples: Sequence[int], size: int, dense: Sequence[int]) -> tuple[int, int]:
    padded = plan.alignment.in_pack(sum(plan.alignment.padded(plan.lengths[s], size) for s in samples), size)
    return padded, sum(dense[s] for s in samples)


def _fits(plan: StepPlan, samples: Sequence[int], size: int, budget: BoundaryBudget, dense: Sequence[int]) -> bool:
    held, room = _held(plan, samples, size, dense), _room(plan, size, budget)
    return held[0] <= room[0] and held[1] <= room[1]


def _sizes_alone(plan: StepPlan, pack: Pack, sample: int, options: Replanning, dense: Sequence[int]) -> list[int]:
    """The CP sizes, ascending, on which a sample of a pack keeps its budgets alone."""
    return [c for c in options.sizes(plan) if _pack_fits(plan, _around(pack, c, (sample,)), options, dense)]


def _parts(plan: StepPlan, pack: Pack, size: int, options: Replanning, dense: Sequence[int]) -> list[Pack]:
    """A pack's samples, in order, in as many packs as they need on the group of ``size`` around its own."""
    parts: list[Pack] = []
    for sample in pack.samples:
        longer = _around(pack, size, (*parts[-1].samples, sample)) if parts else None
        if longer is not None and _pack_fits(plan, longer, options, dense):
            parts[-1] = longer
        else:
            parts.append(_around(pack, size, (sample,)))
    return parts


# ---------------------------------------------------------------- planning anew


def _scheduled(plan: StepPlan, options: Replanning, share: float) -> Iterator[Replanned]:
    """Plans of the whole batch with a share of the tokens a rank."""
    most = options.budget.within(plan.max_seqlen_per_dp_cp_rank).max_tokens or 0
    limit = max(1, int(share * most))
    layout = next(plan.packs()).layout
    common: dict[str, Any] = {
        "mode": plan.mode,
        "microbatch_multiple": options.microbatch_multiple,
        "alignment": plan.alignment,
    }
    speeds = None if options.speeds is None else tuple(options.speeds)
    sizes = options.sizes(plan)
    for size in sizes:
        at = f"of at most {limit} tokens a rank"
        try:
            dynamic = DynamicScheduler(
                plan.ranks,
                limit,
                options.cost,
                layout,
                min_context_parallel_size=size,
                max_context_parallel_size=sizes[-1],
                rank_speeds=speeds,
                **common,
            )
            yield from _made(dynamic, plan, f"planned anew with packs {at} on {size} ranks or more")
            static = StaticScheduler(plan.ranks, limit, size, layout, **common)
            yield from _made(static, plan, f"planned anew with packs {at}, all on {size} rank(s)")
        except ConfigurationError:  # a size or limit that the dynamic scheduler does not have
            continue


def _made(scheduler: Scheduler, plan: StepPlan, how: str) -> Iterator[Replanned]:
    """A scheduler's plan, under the limit of the first one; nothing if it refuses."""
    try:
        made = scheduler.schedule(plan.lengths)
    except PlanError:  # a sample too long for the limit, or too few for lock-step
        return
    yield Replanned(replace(made, max_seqlen_per_dp_cp_rank=plan.max_seqlen_per_dp_cp_rank), how)


# --------------------------------------------------------------------- checking


def _keeps(plan: StepPlan, options: Replanning, dense: Sequence[int], hopeless: frozenset[int]) -> bool:
    """Whether all CP sizes are allowed and all shards keep their budgets, but for what hopeless samples bring."""
    allowed = options.sizes(plan)
    return all(
        pack.cp_size in allowed and _pack_fits(plan, _without(pack, hopeless), options, dense) for pack in plan.packs()
    )


def _pack_fits(plan: StepPlan, pack: Pack, options: Replanning, dense: Sequence[int]) -> bool:
    """Whether a pack's shards keep their budgets: budgeted ones do if all of them together could."""
    budget = options.budget.within(plan.max_seqlen_per_dp_cp_rank)
    if not pack.samples:
        return True
    if not _fits(plan, pack.samples, pack.cp_size, budget, dense):
        return False
    if pack.layout == BUDGETED:
        return True
    alone = replace(plan, microbatches=((pack,),))
    layout = pack_layouts(alone, options.segments, budget, options.cost)[0]
    own = None if options.segments is None else [options.segments[s] for s in pack.samples]
    loads = shard_loads(layout, pieces_of(layout.lengths, own, budget), Work.of(options.cost))
    most = budget.max_tokens, budget.dense_limit
    return all(
        (most[0] is None or load.tokens <= most[0]) and (most[1] is None or load.dense_tokens <= most[1])
        for load in loads
    )
