"""A plan with the layouts of its packs, and their audit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from lightning_dcp.boundaries.audit import audit
from lightning_dcp.boundaries.budget import BoundaryBudget
from lightning_dcp.boundaries.findings import Audit
from lightning_dcp.boundaries.layouts import FROM_SEGMENTS, Preferred, pack_layouts
from lightning_dcp.boundaries.pieces import PackSegments
from lightning_dcp.boundaries.replan import Replanning, impossible, replanned
from lightning_dcp.errors import BoundaryError, PlanError
from lightning_dcp.parallel.layout import PackLayout
from lightning_dcp.schedule.cost import CostModel
from lightning_dcp.schedule.plan import Pack, StepPlan

OnViolation = Literal["warn", "replan", "error"]
Ring = Callable[[Pack], Sequence[int]]
"""The places of a pack's group in ring order."""


@dataclass(frozen=True)
class Settled:
    """A plan with the layouts of its packs.

    Attributes:
        plan: who does what.
        layouts: of each pack, in the plan's order; None where its name says it, and empty where that holds for all.
        audit: what was found of the shards; None if nobody asked.
    """

    plan: StepPlan
    layouts: tuple[PackLayout | None, ...] = ()
    audit: Audit | None = None


def settle(
    plan: StepPlan,
    lengths: Sequence[int],
    segments: PackSegments,
    budget: BoundaryBudget,
    cost: CostModel | None = None,
    on_violation: OnViolation = "warn",
    *,
    sample_ids: Sequence[Any] | None = None,
    sizes: Sequence[int] | None = None,
    microbatch_multiple: int = 1,
    speeds: Sequence[float] | None = None,
    preferred: Preferred | None = None,
    ring: Ring | None = None,
) -> Settled:
    """Lay out the packs of a plan, audit them, and do what was asked where a shard is over its budget.

    Depends on nothing but its arguments, so that all ranks come to the same.

    Args:
        plan: a valid plan.
        lengths: tokens of each sample of the batch.
        segments: of each sample; None: plain samples.
        budget: of each shard.
        cost: how much packs cost; None: a 7B model on H100s.
        on_violation: ``warn``: the audit tells; ``replan``: another plan is made whose shards keep their budgets, but for
            samples that no CP size has room for, and the audit's notes say which; where none is found the audit tells,
            too; ``error``: the batch is refused.
        sample_ids: of the batch's samples, for messages.
        sizes: the CP sizes that another plan may use; None: all that the plane offers.
        microbatch_multiple: of the number of micro-batches of another plan, in lock-step.
        speeds: of the plane's ranks, for another plan; None: all are alike.
        preferred: where the densest shards of a pack go.
        ring: the places of a pack's group in ring order, for how far dense keys travel; None: the order of the ranks.

    Raises:
        BoundaryError: with ``error``, a shard over a budget.
        PlanError: lengths or segments of another batch; an unknown ``on_violation``.
    """
    if on_violation not in ("warn", "replan", "error"):
        raise PlanError(f"on_violation={on_violation!r} is unknown: use 'warn', 'replan' or 'error'")
    if tuple(lengths) != plan.lengths:
        raise PlanError(f"a plan for samples of {plan.lengths} tokens, and a batch of {tuple(lengths)}")
    first = _laid_out(plan, segments, budget, cost, sample_ids, preferred, ring)
    found = first.audit
    if found is None or found.level != "refuse" or on_violation == "warn":
        return first
    if on_violation == "error":
        raise BoundaryError(_message("shards over their budgets", found))
    options = Replanning(segments, budget, cost, sizes, microbatch_multiple, speeds)
    hopeless = impossible(plan, options)
    other = replanned(plan, options, hopeless)
    second = None if other is None else _laid_out(other.plan, segments, budget, cost, sample_ids, preferred, ring)
    was = _over(first)
    broken = f"{len(was)} of {len(list(plan.packs()))} pack(s) had shards over their budgets"
    if other is None or second is None or second.audit is None or any(hopeless.isdisjoint(p) for p in _over(second)):
        note = f"not replanned: {broken}, and no other plan was found that keeps them{_cannot(hopeless, sample_ids)}"
        return replace(first, audit=replace(found, notes=(note,)))
    note = f"replanned, as {broken}: {other.how}"
    if second.audit.level == "refuse":
        mended = sum(hopeless.isdisjoint(pack) for pack in was)
        note = f"replanned: {mended} of {len(was)} mended{_cannot(hopeless, sample_ids)} ({broken}; {other.how})"
    return replace(second, audit=replace(second.audit, notes=(note,)))


def _over(settled: Settled) -> list[tuple[int, ...]]:
    """The samples of each pack with a shard over a budget."""
    packs, found = list(settled.plan.packs()), settled.audit or Audit(())
    return [packs[number].samples for number in sorted({finding.pack for finding in found.at_least("refuse")})]


def _cannot(hopeless: frozenset[int], sample_ids: Sequence[Any] | None) -> str:
    """Which samples no CP size has room for; empty if none."""
    names = [str(s if sample_ids is None else sample_ids[s]) for s in sorted(hopeless)]
    told = ", ".join(names[:-1]) + " and " + names[-1] if len(names) > 1 else "".join(names)
    return f"; sample(s) {told} cannot be, at any CP size" if names else ""


def _laid_out(
    plan: StepPlan,
    segments: PackSegments,
    budget: BoundaryBudget,
    cost: CostModel | None,
    sample_ids: Sequence[Any] | None,
    preferred: Preferred | None,
    ring: Ring | None,
) -> Settled:
    layouts = pack_layouts(plan, segments, budget, cost, preferred=preferred)
    rings = None if ring is None else [ring(pack) for pack in plan.packs()]
    found = audit(plan, segments, budget, layouts, cost=cost, sample_ids=sample_ids, rings=rings)
    told = tuple(
        layout if pack.layout in FROM_SEGMENTS else None for pack, layout in zip(plan.packs(), layouts, strict=True)
    )
    return Settled(plan, told if any(layout is not None for layout in told) else (), found)


def _message(what: str, found: Audit) -> str:
    return "\n".join([f"{what}:", *(f"  {line}" for line in found.lines("warn"))])
