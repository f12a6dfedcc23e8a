"""The static baseline: every pack on groups of one fixed size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

from lightning_dcp.errors import PlanError
from lightning_dcp.schedule.alignment import NO_ALIGNMENT, Alignment
from lightning_dcp.schedule.plan import MicroBatch, Mode, Pack, StepPlan, check_lengths, divisors


@dataclass(frozen=True)
class StaticScheduler:
    """Sequence packing at one context-parallel size, by the rule of Megatron-Core's ``dp_balanced`` scheduler.

    1. Samples are packed in the batch's order; a sample that no longer fits starts the next pack.
    2. Samples are taken from the ends of the last packs, one at a time, to be packs of their own, until all
       ``ranks / context_parallel_size`` groups have as many packs.
    3. Pack k runs in micro-batch k // groups, on group k % groups.

    Time O(samples). In ``free`` mode the same packs run without barriers, and a batch with too few samples for step 2
    leaves groups without a pack in the last micro-batch; in ``lockstep`` mode it is refused.

    Attributes:
        ranks: size of the plane.
        max_seqlen_per_dp_cp_rank: most tokens a rank may hold of one micro-batch.
        context_parallel_size: ranks of every group; divides ``ranks``.
        layout: layout of every pack.
        mode: ``free`` or ``lockstep``.
        microbatch_multiple: the number of micro-batches is made a multiple of this, as interleaved pipeline schedules
            need it (Megatron-Core's ``microbatch_group_size_per_vp_stage``); over 1 in ``lockstep`` mode only.
        alignment: the padding that samples and packs get, which counts as tokens.
    """

    ranks: int
    max_seqlen_per_dp_cp_rank: int
    context_parallel_size: int
    layout: str = "zigzag"
    mode: Mode = "free"
    _: KW_ONLY
    microbatch_multiple: int = 1
    alignment: Alignment = NO_ALIGNMENT

    def schedule(self, lengths: Sequence[int]) -> StepPlan:
        """Plan a batch.

        Raises:
            PlanError: an empty batch or sample; a size that does not divide the plane; in lock-step too few samples for
                every group to have one; a ``microbatch_multiple`` below 1, or over 1 in free mode.
            SampleTooLongError: a sample over ``context_parallel_size * max_seqlen_per_dp_cp_rank`` tokens.
        """
        c, limit = self.context_parallel_size, self.alignment.limit(self.max_seqlen_per_dp_cp_rank)
        self._check_settings()
        tokens = check_lengths(lengths, c, limit)
        groups = self.ranks // c
        packs = next_fit([self.alignment.padded(n, c) for n in tokens], c * limit)
        missing = -len(packs) % (groups * self.microbatch_multiple)
        unmet = missing - split_off(packs, missing)
        if unmet and self.mode == "lockstep":
            raise PlanError(self._too_few(len(tokens), len(packs) + unmet))
        rounds = tuple(self._round(packs[i : i + groups]) for i in range(0, len(packs), groups))
        most = self.max_seqlen_per_dp_cp_rank
        return StepPlan(self.ranks, most, tuple(tokens), rounds, self.mode, alignment=self.alignment)

    def _round(self, packs: Sequence[range]) -> MicroBatch:
        c = self.context_parallel_size
        return tuple(Pack(group * c, c, tuple(samples), self.layout) for group, samples in enumerate(packs))

    def _check_settings(self) -> None:
        c, multiple = self.context_parallel_size, self.microbatch_multiple
        if c not in divisors(self.ranks):
            raise PlanError(f"context_parallel_size={c} does not divide the plane of {self.ranks} ranks")
        if self.ranks < 1 or self.max_seqlen_per_dp_cp_rank < 1:
            raise PlanError(f"{self}: ranks and max_seqlen_per_dp_cp_rank must be 1 or more")
        for problem in self.alignment.problems(self.max_seqlen_per_dp_cp_rank):
            raise PlanError(f"{problem.asked}: {problem.found}; {problem.remedy}")
        if self.mode not in ("free", "lockstep"):
            raise PlanError(f"unknown mode {self.mode!r}: use 'free' or 'lockstep'")
        if multiple < 1:
            raise PlanError(f"microbatch_multiple={multiple} is not a positive number of micro-batches")
        if multiple > 1 and self.mode != "lockstep":
            raise PlanError(f"microbatch_multiple={multiple} has a meaning in lock-step only: use mode='lockstep'")

    def _too_few(self, samples: int, packs: int) -> str:
        groups = self.ranks // self.context_parallel_size
        return (
            f"{samples} sample(s) cannot be {packs} packs, which {groups} groups of "
            f"context_parallel_size={self.context_parallel_size} need in lock-step for {packs // groups} "
            "micro-batch(es) each: use larger batches, a larger context_parallel_size, or the dynamic scheduler"
        )


def next_fit(lengths: Sequence[int], capacity: int) -> list[range]:
    """Runs of samples, in order, each of at most ``capacity`` tokens; a sample that does not fit starts the next run."""
    packs = []
    start = tokens = 0
    for sample, length in enumerate(lengths):
        if tokens + length > capacity and sample > start:
            packs.append(range(start, sample))
            start, tokens = sample, 0
        tokens += length
    packs.append(range(start, len(lengths)))
    return packs


def split_off(packs: list[range], wanted: int) -> int:
    """Move last samples of the last packs with more than one into packs of their own, appended to ``packs``.

    Returns:
        How many packs were made: ``wanted``, or fewer if the samples do not suffice.
    """
    made = 0
    for i in reversed(range(len(packs))):
        taken = min(wanted - made, len(packs[i]) - 1)
        kept = packs[i][: len(packs[i]) - taken]
        packs.extend(range(sample, sample + 1) for sample in reversed(packs[i][len(kept) :]))
        packs[i] = kept
        made += taken
    return made
