"""Errors of this package: each says what was asked, what was found, and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class DCPError(RuntimeError):
    """Base of every error this package raises on purpose."""


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a configuration.

    Attributes:
        asked: what the user asked for, e.g. ``context_parallel_size=4``.
        found: what was found instead, e.g. ``a DPxCP plane of 2 ranks``.
        remedy: what to change.
    """

    asked: str
    found: str
    remedy: str

    def __str__(self) -> str:
        return f"asked: {self.asked}\n    found: {self.found}\n    do: {self.remedy}"


class ConfigurationError(DCPError):
    """All problems of a configuration at once, raised at set-up."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        lines = [f"{len(self.problems)} problem(s) in the configuration:"]
        lines += [f"  {i}. {problem}" for i, problem in enumerate(self.problems, 1)]
        super().__init__("\n".join(lines))


def raise_problems(problems: Sequence[Problem]) -> None:
    """Raise one :class:`ConfigurationError` if there are any problems."""
    if problems:
        raise ConfigurationError(problems)


class BatchError(DCPError):
    """A batch of a format, shape or content that cannot be scheduled."""


class DataError(DCPError):
    """A file or line of the user's data that cannot be read."""


class PlanError(DCPError):
    """A plan that breaks one of its own rules."""


class SampleTooLongError(PlanError):
    """A sample that does not fit on the largest group.

    Attributes:
        sample: its index in the batch.
        length: its tokens.
        ranks: ranks of the largest group.
        max_seqlen_per_dp_cp_rank: most tokens a rank may hold.
    """

    def __init__(
        self, sample: int, length: int, ranks: int, max_seqlen_per_dp_cp_rank: int, *, sample_id: int | None = None
    ) -> None:
        self.sample, self.length, self.ranks = sample, length, ranks
        self.max_seqlen_per_dp_cp_rank = max_seqlen_per_dp_cp_rank
        needed = -(-length // max_seqlen_per_dp_cp_rank)
        name = f"sample {sample} of the batch" + ("" if sample_id is None else f" (id {sample_id})")
        super().__init__(
            f"{name} has {length} tokens; at max_seqlen_per_dp_cp_rank={max_seqlen_per_dp_cp_rank} it would need "
            f"{needed} ranks, and the largest context-parallel group has {ranks}. The largest length that fits is "
            f"{ranks * max_seqlen_per_dp_cp_rank}: cut the sample, raise max_seqlen_per_dp_cp_rank (and the max_tokens of a "
            "boundary_budget, which is the smaller of the two where one is given), or use more ranks."
        )

    def named(self, sample_id: int) -> SampleTooLongError:
        """The same error with the sample's own id."""
        return SampleTooLongError(
            self.sample, self.length, self.ranks, self.max_seqlen_per_dp_cp_rank, sample_id=sample_id
        )


class BoundaryError(PlanError):
    """A batch that cannot be cut within its budgets; the message has every finding of the audit that matters."""


class PlanMismatchError(PlanError):
    """Ranks of one plane hold different plans, or read different batches."""


class RegionError(DCPError):
    """The module to be run context-parallel cannot be found or called."""


class UnsupportedAttentionError(DCPError):
    """An attention call that context parallelism cannot run exactly."""


class CheckpointError(DCPError):
    """A checkpoint that cannot be written, or that is not one of this run's module."""


class PeerFailureError(DCPError):
    """Another rank failed; the message says which one and why."""
