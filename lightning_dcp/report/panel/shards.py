"""What the shards of kept steps held, against their budgets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_dcp.stability.record import PackTime, StepRecord

Counts = NDArray[np.int64]
MOST_POINTS = 1500
MOST_TEXT = 60
"""Characters of a sample's id."""


@dataclass(frozen=True)
class ShardPoint:
    """One rank's part of one pack.

    Attributes:
        step: of the pack.
        rank: place in the plane.
        cp_size: of the pack's group.
        tokens: that the shard held.
        dense_tokens: those of dense segments among them.
        over: whether it was over one of the budgets.
        samples: ids of the pack's samples, in words.
    """

    step: int
    rank: int
    cp_size: int
    tokens: int
    dense_tokens: int
    over: bool
    samples: str


@dataclass(frozen=True)
class ShardBudgets:
    """The shards of a run.

    Attributes:
        points: to draw: all that are over a budget, and others.
        shards: how many there were.
        over_tokens: shards with more than ``max_tokens``.
        over_dense: shards with more than ``dense_limit``.
        max_tokens: budget of tokens; None without one.
        dense_limit: budget of dense tokens; None without one.
        steps: steps whose packs were kept.
    """

    points: tuple[ShardPoint, ...]
    shards: int
    over_tokens: int
    over_dense: int
    max_tokens: int | None
    dense_limit: int | None
    steps: int

    @property
    def has_dense(self) -> bool:
        """Whether any shard held dense tokens."""
        return any(point.dense_tokens for point in self.points)


def shard_budgets(records: Sequence[StepRecord], meta: Mapping[str, Any]) -> ShardBudgets:
    """The shards of a run's kept packs.

    Args:
        records: its steps.
        meta: what the run was; ``budget`` (``max_tokens``, ``dense_limit``) and ``max_seqlen_per_dp_cp_rank`` are read.
    """
    budget = meta.get("budget")
    budget = budget if isinstance(budget, Mapping) else {}
    max_tokens = _count(budget.get("max_tokens")) or _count(meta.get("max_seqlen_per_dp_cp_rank"))
    dense_limit = _count(budget.get("dense_limit"))
    packs = [(record.step, pack) for record in records for pack in record.packs]
    tokens = np.array([pack.tokens for _, pack in packs])
    dense = np.array([pack.dense_tokens for _, pack in packs])
    over_tokens, over_dense = _over(tokens, max_tokens), _over(dense, dense_limit)
    over = over_tokens | over_dense
    return ShardBudgets(
        tuple(_point(*packs[i], over=bool(over[i])) for i in _drawn(tokens, dense, over)),
        len(packs),
        int(over_tokens.sum()),
        int(over_dense.sum()),
        max_tokens,
        dense_limit,
        sum(bool(record.packs) for record in records),
    )


def _over(values: Counts, limit: int | None) -> NDArray[np.bool_]:
    return np.zeros(len(values), dtype=bool) if limit is None else np.asarray(values > limit)


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _point(step: int, pack: PackTime, *, over: bool) -> ShardPoint:
    return ShardPoint(step, pack.rank, pack.cp_size, pack.tokens, pack.dense_tokens, over, named(pack.sample_ids))


def _drawn(tokens: Counts, dense: Counts, over: NDArray[np.bool_]) -> list[int]:
    """Numbers of not too many shards: those over a budget, the densest first; then the densest and largest; then every nth."""
    if len(tokens) <= MOST_POINTS:
        return list(range(len(tokens)))
    order = [int(i) for i in np.lexsort((-tokens, -dense, ~over))]
    first, rest = order[: MOST_POINTS // 2], order[MOST_POINTS // 2 :]
    return first + rest[:: -(-len(rest) // (MOST_POINTS - len(first)))]


def named(sample_ids: Sequence[Any], most: int = 3) -> str:
    """Ids in words; of many the first, and how many more."""
    shown = [short(str(sample)) for sample in sample_ids[:most]]
    more = len(sample_ids) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def short(text: str, most: int = MOST_TEXT) -> str:
    """A text cut to a length, in its middle."""
    return text if len(text) <= most else f"{text[: most - most // 3 - 3]}...{text[-(most // 3) :]}"
