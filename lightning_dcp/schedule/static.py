"""The static baseline: every pack on groups of one fixed size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_dcp.errors import PlanError
from lightning_dcp.schedule.plan import Pack, StepPlan, check_lengths, divisors, in_rounds


@dataclass(frozen=True)
class StaticScheduler:
    """Samples dealt over groups of ``context_parallel_size`` ranks, then packed in order up to the limit.

    Longest sample first, each to the group with the fewest tokens so far: the balance that ordinary sequence packing
    reaches when it knows only lengths.

    Attributes:
        ranks: size of the plane.
        max_seqlen_per_dp_cp_rank: most tokens a rank may hold of one micro-batch.
        context_parallel_size: ranks of every group; divides ``ranks``.
        layout: layout of every pack.
    """

    ranks: int
    max_seqlen_per_dp_cp_rank: int
    context_parallel_size: int
    layout: str = "zigzag"

    def schedule(self, lengths: Sequence[int]) -> StepPlan:
        """Plan a batch.

        Raises:
            PlanError: an empty batch or sample, or a size that does not divide the plane.
            SampleTooLongError: a sample over ``context_parallel_size * max_seqlen_per_dp_cp_rank`` tokens.
        """
        c, limit = self.context_parallel_size, self.max_seqlen_per_dp_cp_rank
        if c not in divisors(self.ranks):
            raise PlanError(f"context_parallel_size={c} does not divide the plane of {self.ranks} ranks")
        check_lengths(lengths, c, limit)
        loads = [0] * (self.ranks // c)
        shares: list[list[int]] = [[] for _ in loads]
        for sample in sorted(range(len(lengths)), key=lambda s: (-lengths[s], s)):
            group = loads.index(min(loads))
            loads[group] += lengths[sample]
            shares[group].append(sample)
        packs = [
            Pack(group * c, c, samples, self.layout)
            for group, share in enumerate(shares)
            for samples in pack_in_order(sorted(share), lengths, c * limit)
        ]
        return StepPlan(self.ranks, limit, tuple(lengths), in_rounds(packs, self.ranks), "free")


def pack_in_order(samples: Sequence[int], lengths: Sequence[int], capacity: int) -> list[tuple[int, ...]]:
    """First-fit: each sample into the first pack with room, in the order given; packs of at most ``capacity`` tokens."""
    packs: list[list[int]] = []
    room: list[int] = []
    for sample in samples:
        fit = next((i for i, free in enumerate(room) if free >= lengths[sample]), None)
        if fit is None:
            packs.append([])
            room.append(capacity)
            fit = len(packs) - 1
        packs[fit].append(sample)
        room[fit] -= lengths[sample]
    return [tuple(sorted(pack)) for pack in packs]
