"""A first dynamic scheduler: each sample gets the smallest group that keeps it within the step's target time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lightning_dcp.schedule.cost import CostModel
from lightning_dcp.schedule.plan import Pack, StepPlan, check_lengths, divisors, in_rounds
from lightning_dcp.schedule.static import pack_in_order


@dataclass(frozen=True)
class DynamicScheduler:
    """Plans a whole batch at once for free-running ranks.

    1. The target is the time of a perfectly even step: all work over all ranks.
    2. Each sample gets the smallest size that fits it and keeps its own time within the target.
    3. Largest groups first, longest sample first, each goes to the aligned block that is free earliest.
    4. The samples of a block are packed, in the batch's order, up to the token limit.

    Attributes:
        ranks: size of the plane.
        max_seqlen_per_dp_cp_rank: most tokens a rank may hold of one micro-batch.
        cost: relative cost of a sample by its length.
        layout: layout of every pack.
    """

    ranks: int
    max_seqlen_per_dp_cp_rank: int
    cost: CostModel = field(default_factory=CostModel)
    layout: str = "zigzag"

    def schedule(self, lengths: Sequence[int]) -> StepPlan:
        """Plan a batch.

        Raises:
            PlanError: an empty batch or sample.
            SampleTooLongError: a sample over ``ranks * max_seqlen_per_dp_cp_rank`` tokens.
        """
        check_lengths(lengths, self.ranks, self.max_seqlen_per_dp_cp_rank)
        target = sum(self.cost.sample(n) for n in lengths) / self.ranks
        sizes = [self._size(n, target) for n in lengths]
        blocks = self._place(lengths, sizes)
        packs = [
            Pack(first, c, samples, self.layout)
            for (first, c), share in blocks.items()
            for samples in pack_in_order(sorted(share), lengths, c * self.max_seqlen_per_dp_cp_rank)
        ]
        plan = StepPlan(
            self.ranks, self.max_seqlen_per_dp_cp_rank, tuple(lengths), in_rounds(packs, self.ranks), "free"
        )
        plan.validate()
        return plan

    def _size(self, length: int, target: float) -> int:
        """The smallest size that holds the sample and keeps it within the target; never more ranks than tokens."""
        fitting = [c for c in divisors(self.ranks) if c * self.max_seqlen_per_dp_cp_rank >= length]
        useful = [c for c in fitting if c <= length] or fitting[:1]
        return next((c for c in useful if self.cost.sample(length) / c <= target), useful[-1])

    def _place(self, lengths: Sequence[int], sizes: Sequence[int]) -> dict[tuple[int, int], list[int]]:
        """Samples of each block ``(first_rank, cp_size)``, largest blocks first, as they will run."""
        busy_until = [0.0] * self.ranks
        blocks: dict[tuple[int, int], list[int]] = {}
        for sample in sorted(range(len(lengths)), key=lambda s: (-sizes[s], -lengths[s], s)):
            c = sizes[sample]
            firsts = range(0, self.ranks, c)
            first = min(firsts, key=lambda f: (max(busy_until[f : f + c]), f))
            done = max(busy_until[first : first + c]) + self.cost.sample(lengths[sample]) / c
            busy_until[first : first + c] = [done] * c
            blocks.setdefault((first, c), []).append(sample)
        return blocks
