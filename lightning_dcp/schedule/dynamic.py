"""A first dynamic scheduler: each sample gets the smallest group that keeps it within the step's target time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lightning_dcp.schedule.cost import CostModel
from lightning_dcp.schedule.plan import Pack, StepPlan, check_lengths, divisors, in_rounds
from lightning_dcp.schedule.static import pack_in_order

Blocks = dict[tuple[int, int], list[int]]
"""Samples of each block ``(first_rank, cp_size)``."""

TOLERATED_IMBALANCE = 0.05
"""How far the slowest rank may be over the even step before smaller shares are tried."""
TARGET_HALVINGS = tuple(step / 2 for step in range(17))
"""Targets to try, as halvings of the even step: down to a 256th of it."""


@dataclass(frozen=True)
class DynamicScheduler:
    """Plans a whole batch at once for free-running ranks.

    1. The target is the time of a perfectly even step: all work over all ranks.
    2. Each sample gets the smallest size that fits it and keeps its own time within the target.
    3. Largest groups first, longest sample first, each goes to the aligned block that is free earliest.
    4. Where that leaves the slowest rank well over the even step, 2 and 3 are tried again with lower targets: few
       samples of about the target's size do not share out evenly over ranks, halves of them do better.
    5. The samples of a block are packed, in the batch's order, up to the token limit.

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
        blocks = self._balance(lengths)
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

    def _balance(self, lengths: Sequence[int]) -> Blocks:
        """The highest target whose slowest rank is near the even step, or else the target whose slowest is fastest."""
        even = sum(self.cost.sample(n) for n in lengths) / self.ranks
        tried: list[tuple[float, Blocks]] = []
        for halvings in TARGET_HALVINGS:
            sizes = [self._size(n, even / 2**halvings) for n in lengths]
            tried.append(self._place(lengths, sizes))
            if tried[-1][0] <= even * (1 + TOLERATED_IMBALANCE):
                return tried[-1][1]
        return min(tried, key=lambda option: option[0])[1]

    def _size(self, length: int, target: float) -> int:
        """The smallest size that holds the sample and keeps it within the target; never more ranks than tokens."""
        fitting = [c for c in divisors(self.ranks) if c * self.max_seqlen_per_dp_cp_rank >= length]
        useful = [c for c in fitting if c <= length] or fitting[:1]
        return next((c for c in useful if self.cost.sample(length) / c <= target), useful[-1])

    def _place(self, lengths: Sequence[int], sizes: Sequence[int]) -> tuple[float, Blocks]:
        """When the slowest rank is done, and the samples of each block, largest blocks first, as they will run."""
        busy_until = [0.0] * self.ranks
        blocks: Blocks = {}
        for sample in sorted(range(len(lengths)), key=lambda s: (-sizes[s], -lengths[s], s)):
            c = sizes[sample]
            firsts = range(0, self.ranks, c)
            first = min(firsts, key=lambda f: (max(busy_until[f : f + c]), f))
            done = max(busy_until[first : first + c]) + self.cost.sample(lengths[sample]) / c
            busy_until[first : first + c] = [done] * c
            blocks.setdefault((first, c), []).append(sample)
        return max(busy_until), blocks
