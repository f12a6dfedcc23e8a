"""How costly the tokens of each kind of segment are, from the record of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_dcp.calibration.fit import FloatArray, non_negative_least_squares
from lightning_dcp.errors import DataError
from lightning_dcp.stability.hot import kinds_of
from lightning_dcp.stability.record import StepRecord

COMMON = 0.05
"""Share of the tokens from which a kind is common: the cheapest of these has density 1."""
MOST_KINDS = 10
"""The rarer kinds beyond these are measured as one, and get no density."""
_ROWS_A_COLUMN = 4
_OUTLIER = 4.0
"""Rows whose relative residual is more than so many times the median one are left out: the machine did something else."""
_WORST_CONDITION = 1e6
OTHERS = "(others)"


@dataclass(frozen=True)
class KindCost:
    """One kind of segment.

    Attributes:
        kind: its name.
        tokens: that were seen.
        seconds: of computing, a token.
        density: ``seconds`` over those of the cheapest common kind; None where no cost could be seen.
    """

    kind: str
    tokens: int
    seconds: float
    density: float | None


@dataclass(frozen=True)
class DensityFit:
    """What was fitted.

    Attributes:
        kinds: the commonest first.
        rows: ranks' steps that it was fitted to.
        left_out: others, that were far off.
        median_residual: the median size of (predicted / measured - 1).
    """

    kinds: tuple[KindCost, ...]
    rows: int
    left_out: int
    median_residual: float

    @property
    def densities(self) -> dict[str, float]:
        """Density of each kind whose cost could be seen."""
        return {cost.kind: cost.density for cost in self.kinds if cost.density is not None}


def learn_densities(records: Iterable[StepRecord]) -> dict[str, float]:
    """Density of each kind of segment; see :func:`fit_densities`."""
    return fit_densities(records).densities


def fit_densities(records: Iterable[StepRecord]) -> DensityFit:
    """Fit ranks' seconds of computing to the tokens of each kind that they held.

    ``busy seconds = overhead * packs + sum over kinds of seconds per token * tokens``, with no coefficient below 0, by least
    squares of relative residuals, once more without the rows that are far off. Attention grows with the square of a
    sample's length; a kind that lies in long samples is charged for it.

    Args:
        records: of steps, with packs.

    Raises:
        DataError: too few steps with packs, kinds that cannot be told apart, no time that grows with tokens.
    """
    counts, rows = _rows(records)
    kinds = _kinds(rows)
    _check_rows(len(rows), len(kinds))
    design = _design(counts, rows, kinds)
    _check_told_apart(design, kinds)
    values, kept = _fit(design)
    _check_told_apart(design[kept], kinds)
    residuals = np.abs(design[kept] @ values - 1)
    costs = _costs(kinds, rows, values[1:].tolist())
    return DensityFit(costs, int(kept.sum()), int((~kept).sum()), float(np.median(residuals)))


def _rows(records: Iterable[StepRecord]) -> tuple[list[tuple[int, float]], list[Counter[str]]]:
    """Of each rank in each step: its packs and the seconds that it had a core for them; its tokens by kind."""
    counts, rows = [], []
    for record in records:
        for time in record.ranks:
            packs = [pack for pack in record.packs if pack.rank == time.rank]
            computed = time.busy_s - time.queued_s
            if packs and computed > 0:
                counts.append((len(packs), computed))
                rows.append(sum((Counter(kinds_of(pack)) for pack in packs), Counter()))
    return counts, rows


def _kinds(rows: Sequence[Counter[str]]) -> list[str]:
    """The commonest first; the rarest as one."""
    total = sum(rows, Counter())
    ordered = sorted(total, key=lambda kind: (-total[kind], kind))
    return ordered if len(ordered) <= MOST_KINDS else [*ordered[: MOST_KINDS - 1], OTHERS]


def _tokens(row: Counter[str], kinds: Sequence[str]) -> list[int]:
    named = [row[kind] for kind in kinds if kind != OTHERS]
    return [*named, row.total() - sum(named)] if OTHERS in kinds else named


def _design(counts: Sequence[tuple[int, float]], rows: Sequence[Counter[str]], kinds: Sequence[str]) -> FloatArray:
    """Packs and tokens of each kind, over the seconds."""
    columns = [[packs, *_tokens(row, kinds)] for (packs, _), row in zip(counts, rows, strict=True)]
    return np.array(columns, dtype=np.float64) / np.array([[busy] for _, busy in counts])


def _fit(design: FloatArray) -> tuple[FloatArray, NDArray[np.bool_]]:
    """Values, and the rows that they were fitted to."""
    values = non_negative_least_squares(design, np.ones(len(design)))
    sizes = np.abs(design @ values - 1)
    kept = sizes <= max(_OUTLIER * float(np.median(sizes)), 1e-9)
    return non_negative_least_squares(design[kept], np.ones(int(kept.sum()))), kept


def _costs(kinds: Sequence[str], rows: Sequence[Counter[str]], values: Sequence[float]) -> tuple[KindCost, ...]:
    tokens = np.array([_tokens(row, kinds) for row in rows]).sum(0).tolist()
    common = [v for v, count in zip(values, tokens, strict=True) if v > 0 and count >= COMMON * sum(tokens)]
    if not common:
        raise DataError(
            "the ranks' seconds do not grow with the tokens of any common kind: all of the time is overhead, or noise. "
            "Record a run with longer packs, on a quieter machine"
        )
    return tuple(
        KindCost(kind, count, value, value / min(common) if value > 0 and kind != OTHERS else None)
        for kind, count, value in zip(kinds, tokens, values, strict=True)
    )


def _check_rows(rows: int, kinds: int) -> None:
    needed = _ROWS_A_COLUMN * (kinds + 1)
    if not rows:
        raise DataError(
            "no step of the record says which packs ranks had: record a run with a StabilityMonitor and hop timing on"
        )
    if rows < needed:
        raise DataError(f"{rows} steps of ranks are too few for {kinds} kind(s): record {needed} or more")


def _check_told_apart(design: FloatArray, kinds: Sequence[str]) -> None:
    scaled = design / np.maximum(np.linalg.norm(design, axis=0), 1e-300)
    if np.linalg.cond(scaled) > _WORST_CONDITION:
        raise DataError(
            f"the kinds {', '.join(kinds)} cannot be told apart: ranks always had them (or the number of packs) in the same "
            "proportions. Record a run with more varied batches"
        )
