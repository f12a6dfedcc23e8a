"""A batch with its plan, and the parts of it that this rank runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from lightning_dcp.attention.options import DEFAULT, AttentionOptions
from lightning_dcp.batch.view import BatchView, view
from lightning_dcp.boundaries.budget import DEFAULT_BUDGET, BoundaryBudget
from lightning_dcp.errors import PlanMismatchError, SampleTooLongError
from lightning_dcp.loss.weighting import LossNormalization, pack_weight
from lightning_dcp.models.pack import ActivePack
from lightning_dcp.parallel.clock import WaitClock
from lightning_dcp.parallel.context import make_context
from lightning_dcp.parallel.groups import ParallelGroups
from lightning_dcp.parallel.layout import PackLayout
from lightning_dcp.parallel.randomness import seed_of
from lightning_dcp.parallel.rank_times import PackShare
from lightning_dcp.schedule.plan import Pack, StepPlan
from lightning_dcp.segments import SampleSegments
from lightning_dcp.stability.governor import Fallback
from lightning_dcp.step.ahead import PlanAhead, Planned, Samples
from lightning_dcp.step.pack_share import dense_tokens, pack_share


@dataclass(frozen=True)
class PackWork:
    """One pack, as this rank runs it.

    Attributes:
        number: its place in the plan's order.
        pack: which samples, on which ranks.
        batch: the user's batch, cut down to these samples.
        active: what the regions need to know.
        weight: the share of the batch's loss that this rank's loss is: the pack's, or with sharded outputs a part of it.
        leader: whether this rank speaks for the group: exactly one rank of each group does, but for sharded outputs, where
            each speaks for its tokens.
        seed: of the random numbers drawn in the step, the same on all ranks of the group.
        pack_weight: the whole pack's share of the batch's loss.
    """

    number: int
    pack: Pack
    batch: Any
    active: ActivePack
    weight: float
    leader: bool
    seed: int
    pack_weight: float

    @property
    def copies(self) -> int:
        """Ranks that hold this loss: all of the group, or with sharded outputs only this one."""
        return 1 if self.active.sharded else self.pack.cp_size


@dataclass(frozen=True)
class ScheduledBatch:
    """A batch and its plan.

    Attributes:
        view: the whole batch.
        planned: who does what, the same on every rank of the plane; and whether the step had to wait for it.
        groups: the process groups.
        normalization: what the user's loss is over one batch.
        device: where the packs are computed.
        clock: adds up the time this rank waits.
        attention: how attention is computed.
        seed: of this batch; each pack's own seed follows from it.
        token_multiple: a region's module sees a multiple of so many tokens on each rank.
        gradient_scale: factor of a gradient that does not come through the step's loss.
        state: ring orders and exchange schemes in force; None: rings in the order of the ranks.
        budget: says which segments are dense.
    """

    view: BatchView
    planned: Planned
    groups: ParallelGroups
    normalization: LossNormalization
    device: torch.device
    clock: WaitClock
    attention: AttentionOptions = DEFAULT
    seed: int = 0
    token_multiple: int = 1
    gradient_scale: float = 1.0
    state: Fallback | None = None
    budget: BoundaryBudget = DEFAULT_BUDGET

    @property
    def plan(self) -> StepPlan:
        """Who does what."""
        return self.planned.plan

    @cached_property
    def targets(self) -> tuple[int, ...]:
        """Targets of each sample of the batch; 1 each where the loss is not a mean over targets."""
        return self.view.target_counts() if self.normalization == "tokens" else (1,) * len(self.plan.lengths)

    def _labelled_targets(self) -> int | None:
        """Targets of the whole batch, whatever the loss is over; None if it has no labels."""
        labelled = any(name in self.view.batch for name in ("labels", "shift_labels"))
        return sum(self.view.target_counts()) if labelled else None

    def trial_pack(self) -> int | None:
        """The number of the pack of most samples among those that lie on several ranks and have targets; the same on all."""
        if self.view.tokens is None:
            return None  # samples of several sequences have no parts that a token-wise loss could be about
        packs = enumerate(self.plan.packs())
        cut = [(n, p) for n, p in packs if p.cp_size > 1 and any(self.targets[s] for s in p.samples)]
        large = [(len(p.samples), -n) for n, p in cut if sum(self.plan.lengths[s] for s in p.samples) >= 2 * p.cp_size]
        return -max(large)[1] if large else None

    def works(self) -> Iterator[PackWork]:
        """This rank's packs, in order; each is cut out of the batch when its turn comes."""
        for number, pack in enumerate(self.plan.packs()):
            if self.groups.rank in pack.ranks:
                yield self._work(number, pack)

    def _layout(self, number: int) -> PackLayout | None:
        """The layout of a pack that does not follow from its name in the plan."""
        layouts = self.planned.settled.layouts
        return layouts[number] if layouts else None

    def segments_of(self, pack: Pack) -> list[SampleSegments] | None:
        """The segments of a pack's samples; None if samples have none."""
        segments = self.view.segments
        return None if segments is None else [segments[sample] for sample in pack.samples]

    def _ring(self, number: int, pack: Pack) -> tuple[int, ...] | None:
        """The places of a pack's group in ring order; None for the order of the ranks."""
        if self.state is None or self.state.orders.is_by_rank:
            return None
        layout, segments = self._layout(number), self.segments_of(pack)
        known = layout is not None and segments is not None
        densities = dense_tokens(layout, segments, self.budget) if known else None  # type: ignore[arg-type]
        return self.state.orders.for_group(pack.first_rank, pack.cp_size, densities)

    def _attention(self, pack: Pack) -> AttentionOptions:
        """How a pack's attention is computed."""
        scheme = None if self.state is None else self.state.scheme_for(pack.first_rank, pack.cp_size)
        return self.attention if scheme is None else replace(self.attention, scheme=scheme)

    def share(self, work: PackWork) -> PackShare:
        """What this rank holds of a pack."""
        context, pack = work.active.context, work.pack
        ids = [self.view.sample_ids[sample] for sample in pack.samples]
        segments = self.segments_of(pack)
        return pack_share(
            work.number, pack, context.rank, context.layout, sample_ids=ids, segments=segments, budget=self.budget
        )

    def _work(self, number: int, pack: Pack) -> PackWork:
        part = self.view.part(pack.samples)
        rank = self.groups.rank - pack.first_rank
        context = make_context(
            self.groups.cp_group(pack.first_rank, pack.cp_size),
            rank,
            [self.plan.lengths[s] for s in pack.samples],
            layout=self._layout(number) or pack.layout,
            device=self.device,
            clock=self.clock,
            token_multiple=self.token_multiple,
            alignment=self.plan.alignment,
            ring=self._ring(number, pack),
        )
        seed = seed_of(self.seed, number)
        limit = self.plan.max_seqlen_per_dp_cp_rank
        active = ActivePack(
            part,
            context,
            limit,
            seed_of(seed, rank),
            self._attention(pack),
            pack.layout,
            normalization=self.normalization,
            targets=sum(self.targets[s] for s in pack.samples) if self.normalization == "tokens" else None,
            whole_batch=len(pack.samples) == len(self.plan.lengths),
            count_batch_targets=self._labelled_targets,
            batch_tokens=sum(self.plan.lengths),
            batch_samples=len(self.plan.lengths),
            samples=pack.samples,
            gradient_scale=self.gradient_scale,
        )
        weight = pack_weight(self.normalization, pack, self.targets)
        leader = rank == 0 and self.groups.speaks
        return PackWork(number, pack, part.batch, active, weight, leader, seed, weight)


def schedule_batch(
    batch: Any,
    planner: PlanAhead,
    groups: ParallelGroups,
    *,
    normalization: LossNormalization,
    device: torch.device,
    clock: WaitClock,
    attention: AttentionOptions = DEFAULT,
    seed: int = 0,
    token_multiple: int = 1,
    gradient_scale: float = 1.0,
    state: Fallback | None = None,
    budget: BoundaryBudget | None = None,
) -> ScheduledBatch:
    """Plan a batch and make sure that all ranks of the plane hold the same batch and the same plan.

    Raises:
        BatchError: unknown format, an empty batch or an empty sample.
        SampleTooLongError: a sample that does not fit, named by its id.
        PlanMismatchError: ranks differ.
    """
    whole = view(batch)
    whole.check()
    try:
        planned = planner.plan(Samples.of(whole))
    except SampleTooLongError as error:
        raise error.named(whole.sample_ids[error.sample]) from None
    _check_agreement(planned, whole, groups, clock, state)
    return ScheduledBatch(
        whole,
        planned,
        groups,
        normalization,
        device,
        clock,
        attention,
        seed,
        token_multiple,
        gradient_scale,
        state,
        budget or DEFAULT_BUDGET,
    )


def _check_agreement(
    planned: Planned, whole: BatchView, groups: ParallelGroups, clock: WaitClock, state: Fallback | None
) -> None:
    own = torch.tensor([planned.digest, whole.fingerprint(), 0 if state is None else state.digest()])
    every = [torch.empty_like(own) for _ in groups.world_ranks]
    with clock.waiting():
        dist.all_gather(every, own, group=groups.control)
    table = torch.stack(every)
    for column, (what, remedy) in enumerate(_DIFFERENT.items()):
        odd = [groups.world_ranks[i] for i in (table[:, column] != table[0, column]).nonzero().flatten().tolist()]
        if odd:
            raise PlanMismatchError(
                f"ranks hold different {what}: rank(s) {odd} differ from rank {groups.world_ranks[0]}. {remedy}"
            )


_READING = (
    "Every rank must read the same batch, which the strategy then cuts. Check that a sampler of your own gives the same "
    "order on all ranks, that random crops, noise or masks in the data set or collate function do not depend "
    "on the rank (seed_everything(workers=True) seeds workers by rank), and that a scheduler of your own depends on "
    "nothing but lengths and its settings."
)
_DIFFERENT = {
    "plans": _READING,
    "batches": _READING,
    "ring orders, exchange schemes or speeds": "All ranks must be given the same ring_order, links_file, alarms and fallback.",
}
"""What ranks compare before each batch, in this order, and what to look at where it differs."""
