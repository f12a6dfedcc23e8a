"""How costly the tokens of each kind of segment are, from the record of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_dcp.calibration.fit import FloatArray, non_negative_least_squares
from lightning_dcp.errors import DataError
from lightning_dcp.segments import PLAIN
from lightning_dcp.stability.hot import kinds_of
from lightning_dcp.stability.record import StepRecord

COMMON = 0.05
"""Share of the tokens from which a kind is common: the base, of density 1, is one of these."""
PREFERRED = (PLAIN, "user")
"""Kinds that are the base where they are common."""
BLOCKS = 10
"""Of rows, each left out once, to see how far a cost moves."""
UNSURE = 0.5
"""Spread of a cost over the cost, above which it could not be told."""
FEW_ROWS = 200
MANY_LEFT_OUT = 0.1
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
        spread: of ``seconds``: the jackknife's standard error over blocks of rows; infinite where nothing was seen.
        density: ``seconds`` over those of the base; None where the cost could not be told.
    """

    kind: str
    tokens: int
    seconds: float
    spread: float
    density: float | None


@dataclass(frozen=True)
class DensityFit:
    """What was fitted.

    Attributes:
        kinds: the commonest first.
        base: what density 1 is: a kind, or the median cost.
        rare: kinds that were measured as one.
        rows: ranks' steps that it was fitted to.
        left_out: others, that were far off.
        median_residual: the median size of (predicted / measured - 1).
    """

    kinds: tuple[KindCost, ...]
    base: str
    rare: tuple[str, ...]
    rows: int
    left_out: int
    median_residual: float

    @property
    def densities(self) -> dict[str, float]:
        """Density of each kind that was seen; 1 where it could not be told."""
        told = {cost.kind: cost.density or 1.0 for cost in self.kinds if cost.kind != OTHERS}
        return told | dict.fromkeys(self.rare, 1.0)

    @property
    def not_told(self) -> tuple[str, ...]:
        """Kinds whose density is 1 because it could not be told."""
        return (*(c.kind for c in self.kinds if c.density is None and c.kind != OTHERS), *self.rare)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What makes the densities doubtful."""
        share = self.left_out / (self.rows + self.left_out)
        few = f"only {self.rows} steps of ranks: with fewer than {FEW_ROWS} densities are rough, record a longer run"
        many = f"{share:.0%} of the steps of ranks were left out as far off: record a run on a quieter machine"
        return (*([few] if self.rows < FEW_ROWS else []), *([many] if share > MANY_LEFT_OUT else []))


def learn_densities(records: Iterable[StepRecord]) -> dict[str, float]:
    """Density of each kind of segment; see :func:`fit_densities`."""
    return fit_densities(records).densities


def fit_densities(records: Iterable[StepRecord]) -> DensityFit:
    """Fit ranks' seconds of computing to the tokens of each kind that they held.

    ``busy seconds = overhead * packs + sum over kinds of seconds per token * tokens``, with no coefficient below 0, by least
    squares of relative residuals, once more without the rows that are far off. Attention grows with the square of a
    sample's length; a kind that lies in long samples is charged for it.

    Density 1 is the cost of plain text, or of the user's, where that is common, else the median cost of a token. A kind whose
    cost is 0, or moves by more than half of it when blocks of rows are left out, could not be told.

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
    costs, base = _costs(kinds, rows, values[1:], _spreads(design[kept], values)[1:])
    rare = tuple(sorted(set(sum(rows, Counter())) - set(kinds))) if OTHERS in kinds else ()
    return DensityFit(costs, base, rare, int(kept.sum()), int((~kept).sum()), float(np.median(residuals)))


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


def _spreads(design: FloatArray, values: FloatArray) -> FloatArray:
    """Standard error of each value: the jackknife over blocks of rows, for the columns that are not 0."""
    used = np.flatnonzero(values > 0)
    blocks = np.array_split(np.arange(len(design)), min(BLOCKS, len(design)))
    scale = np.linalg.norm(design[:, used], axis=0)
    found = []
    for block in blocks:
        rest = np.delete(design[:, used], block, axis=0) / scale
        found.append(np.linalg.lstsq(rest, np.ones(len(rest)), rcond=None)[0] / scale)
    spreads = np.full(len(values), np.inf)
    spreads[used] = np.sqrt((len(blocks) - 1) * np.var(np.array(found), axis=0))
    return spreads


def _costs(
    kinds: Sequence[str], rows: Sequence[Counter[str]], values: FloatArray, spreads: FloatArray
) -> tuple[tuple[KindCost, ...], str]:
    """Kinds with their densities, and the base's name."""
    tokens = np.array([_tokens(row, kinds) for row in rows]).sum(0).tolist()
    seen = list(zip(kinds, tokens, values.tolist(), spreads.tolist(), strict=True))
    told = [kind for kind, _, value, spread in seen if value > 0 and spread <= UNSURE * value and kind != OTHERS]
    common = {kind: (value, count) for kind, count, value, _ in seen if kind in told and count >= COMMON * sum(tokens)}
    if not common:
        raise DataError(
            "the ranks' seconds do not grow with the tokens of any common kind, so far as can be told: all of the time is "
            "overhead, or noise. Record a longer run with longer packs, on a quieter machine"
        )
    base, cost = _base(common)
    return (
        tuple(
            KindCost(kind, n, value, spread, value / cost if kind in told else None) for kind, n, value, spread in seen
        ),
        base,
    )


def _base(common: Mapping[str, tuple[float, int]]) -> tuple[str, float]:
    """The base's name and cost, of common kinds' costs and tokens."""
    for kind in PREFERRED:
        if kind in common:
            return f"the cost of {kind}", common[kind][0]
    costs, counts = zip(*sorted(common.values()), strict=True)
    middle = int(np.searchsorted(np.cumsum(counts), sum(counts) / 2))
    return "the median cost of a token of common kinds", costs[middle]


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
