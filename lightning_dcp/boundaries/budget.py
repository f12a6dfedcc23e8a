"""What a shard may hold."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lightning_dcp.errors import Problem, raise_problems
from lightning_dcp.segments import Segment


@dataclass(frozen=True)
class BoundaryBudget:
    """The budgets of one shard: one rank's part of one pack.

    Attributes:
        max_tokens: most tokens; None: what the plan gives a rank (``max_seqlen_per_dp_cp_rank``).
        dense_limit: most tokens of dense segments; None: no limit.
        dense_from: a segment of this density or more is dense.
        tolerance: how much more work than with zigzag the heaviest rank of a group may have, as a share: 0.1 is 10 %.

    Raises:
        ConfigurationError: all bad values at once.
    """

    max_tokens: int | None = None
    dense_limit: int | None = None
    dense_from: float = 1.5
    tolerance: float = 0.1

    def __post_init__(self) -> None:
        problems = [
            Problem(f"{name}={value!r}", "not a whole number of 1 or more", f"give {name} in tokens, or leave it out")
            for name, value in (("max_tokens", self.max_tokens), ("dense_limit", self.dense_limit))
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1)
        ]
        for name, least in (("dense_from", 0.0), ("tolerance", 0.0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < float("inf"):
                problems.append(Problem(f"{name}={value!r}", "not a finite number of 0 or more", f"give such a {name}"))
        raise_problems(problems)

    def is_dense(self, segment: Segment) -> bool:
        """Whether a segment's tokens count as dense."""
        return segment.density >= self.dense_from

    def within(self, max_seqlen_per_dp_cp_rank: int) -> BoundaryBudget:
        """The same budget where a rank may hold no more than a plan gives it."""
        tokens = (
            max_seqlen_per_dp_cp_rank if self.max_tokens is None else min(self.max_tokens, max_seqlen_per_dp_cp_rank)
        )
        return replace(self, max_tokens=tokens)


DEFAULT_BUDGET = BoundaryBudget()
"""Where nobody says anything: no limits beyond the plan's own."""
