"""What is known of a step whose hops were not timed."""

from __future__ import annotations

from lightning_dcp.stability.record import PackTime, RankTime, StepRecord
from lightning_dcp.step.runner import BatchResult
from lightning_dcp.step.scheduled import ScheduledBatch


def untimed_record(step: int, scheduled: ScheduledBatch, result: BatchResult) -> StepRecord:
    """A record in which ranks compute or wait: what was on its way is not told from who was late.

    Args:
        step: number of the batch in the run.
        scheduled: the batch and its plan.
        result: what its packs gave.
    """
    ranks = tuple(
        RankTime(rank, busy, max(0.0, result.seconds - busy), 0.0, 0.0) for rank, busy in enumerate(result.busy)
    )
    plan = scheduled.plan
    return StepRecord(step, result.seconds, sum(plan.lengths), plan.extra.get("predicted_step_s"), ranks)


def planned_packs(scheduled: ScheduledBatch) -> list[PackTime]:
    """The packs of all ranks, without times; each rank has an equal part of a pack's tokens."""
    plan, ids = scheduled.plan, scheduled.view.sample_ids
    return [
        PackTime(
            number,
            rank,
            pack.first_rank,
            pack.cp_size,
            0.0,
            0.0,
            pack.tokens(plan.lengths) // pack.cp_size,
            sample_ids=tuple(ids[sample] for sample in pack.samples),
            sample_tokens=tuple(plan.lengths[sample] for sample in pack.samples),
        )
        for number, pack in enumerate(plan.packs())
        for rank in pack.ranks
    ]
