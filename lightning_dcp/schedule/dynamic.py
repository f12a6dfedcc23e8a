"""A first dynamic scheduler: each sample gets the smallest group that keeps it within the step's target time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lightning_dcp.schedule.cost import CostModel
from lightning_dcp.schedule.plan import Pack, StepPlan, check_lengths, divisors, in_rounds
from lightning_dcp.schedule.static import pack_in_order

Blocks = dict[tuple[int, int], list[int]]
"""Samples of each block ``(first_rank, cp_size)``."""
Placement = tuple[list[float], Blocks]
"""When each rank is done, and what it does."""

TOLERANCE = 0.01
"""How much faster a plan must be for its smaller shares to be worth it."""
TRIES = 64
"""How often a sample of the slowest rank is cut further."""
WORK = 500_000
"""Most samples times ranks that all these tries may look at: large batches share out evenly anyway."""


@dataclass(frozen=True)
class DynamicScheduler:
    """Plans a whole batch at once for free-running ranks.

    1. The target is the time of a perfectly even step: all work over all ranks.
    2. Each sample gets the smallest size that fits it and keeps its own time within the target.
    3. Largest groups first, longest sample first, each goes to the aligned block that is free earliest.
    4. Cutting only what does not fit is tried as well. Then the longest sample of the slowest rank is cut
       further, again and again: few samples of about the target's size do not share out evenly over ranks, and halves of
       them do better. The fastest placement is taken, or an earlier one as fast.
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
        limit = self.max_seqlen_per_dp_cp_rank
        return StepPlan(self.ranks, limit, tuple(lengths), in_rounds(packs, self.ranks), "free")

    def _balance(self, lengths: Sequence[int]) -> Blocks:
        """Samples of each block; cut no further than makes the slowest rank faster."""
        target = sum(self.cost.sample(n) for n in lengths) / self.ranks
        uncut = [self._size(n, float("inf")) for n in lengths]
        sizes = [self._size(n, target) for n in lengths]
        tried = [self._place(lengths, uncut), self._place(lengths, sizes)]
        for _ in range(min(TRIES, WORK // (self.ranks * len(lengths)))):
            longest = self._longest_of_slowest(lengths, sizes, tried[-1])
            larger = [c for c in divisors(self.ranks) if sizes[longest] < c <= lengths[longest]]
            if not larger:
                break
            sizes[longest] = larger[0]
            tried.append(self._place(lengths, sizes))
        fastest = min(max(busy) for busy, _ in tried)
        return next(blocks for busy, blocks in tried if max(busy) <= fastest * (1 + TOLERANCE))

    def _longest_of_slowest(self, lengths: Sequence[int], sizes: Sequence[int], placed: Placement) -> int:
        """The sample that takes longest on the rank that is done last."""
        busy, blocks = placed
        slowest = busy.index(max(busy))
        own = [s for (first, c), share in blocks.items() if first <= slowest < first + c for s in share]
        return max(own, key=lambda s: (self.cost.sample(lengths[s], sizes[s]), -s))

    def _size(self, length: int, target: float) -> int:
        """The smallest size that holds the sample and keeps it within the target; never more ranks than tokens."""
        fitting = [c for c in divisors(self.ranks) if c * self.max_seqlen_per_dp_cp_rank >= length]
        useful = [c for c in fitting if c <= length] or fitting[:1]
        within = next((c for c in useful if self.cost.sample(length, c) <= target), None)
        return within or min(useful, key=lambda c: (self.cost.sample(length, c), c))

    def _place(self, lengths: Sequence[int], sizes: Sequence[int]) -> Placement:
        """When each rank is done, and the samples of each block, largest blocks first, as they will run."""
        busy_until = [0.0] * self.ranks
        blocks: Blocks = {}
        for sample in sorted(range(len(lengths)), key=lambda s: (-sizes[s], -lengths[s], s)):
            c = sizes[sample]
            firsts = range(0, self.ranks, c)
            first = min(firsts, key=lambda f: (max(busy_until[f : f + c]), f))
            done = max(busy_until[first : first + c]) + self.cost.sample(lengths[sample], c)
            busy_until[first : first + c] = [done] * c
            blocks.setdefault((first, c), []).append(sample)
        return busy_until, blocks
