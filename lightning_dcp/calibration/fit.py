"""The coefficients of a cost model, by non-negative least squares of relative residuals."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_dcp.errors import ConfigurationError, Problem
from lightning_dcp.schedule.cost import CostModel

FloatArray = NDArray[np.float64]

_OVERLAPS = tuple(step / 10 for step in range(11))
_WORTH_IT = 0.95
"""More overlap is taken only if it lowers the sum of squares at least to this share."""
_TOO_FAST_TO_SEE = 1e15
"""Bytes/s where the transfers of more tokens took no more time."""
_NOTHING = 1e-9
"""Share of the measured seconds below which a column's part is rounding."""
_COLUMNS = ("pack_overhead", "linear", "attention", "hop_latency", "hop_bytes", "internode_latency", "internode_bytes")
_HOPS = slice(3, 7)
_NO_GROWTH = Problem(
    "a cost model from measured steps",
    "steps that take no longer with more tokens: all of their time is overhead, or noise",
    "measure longer packs (--lengths, up to the ranks times max_seqlen_per_dp_cp_rank), on a quieter machine",
)


@dataclass(frozen=True)
class Observation:
    """One measured step, in which all groups did the same.

    Attributes:
        samples: tokens of each sample of a pack.
        cp_size: ranks of each group.
        packs: such packs in a row.
        seconds: of the step.
    """

    samples: tuple[int, ...]
    cp_size: int
    packs: int
    seconds: float

    def predicted(self, cost: CostModel) -> float:
        """Seconds by a cost model."""
        return self.packs * cost.pack_seconds(self.samples, self.cp_size)


@dataclass(frozen=True)
class Fit:
    """A fitted cost model and how well it fits.

    Attributes:
        cost: the model.
        observations: what it was fitted to.
    """

    cost: CostModel
    observations: tuple[Observation, ...]

    @property
    def predicted(self) -> FloatArray:
        """Seconds of each observation by the model."""
        return np.array([o.predicted(self.cost) for o in self.observations])

    @property
    def measured(self) -> FloatArray:
        """Seconds of each observation as measured."""
        return np.array([o.seconds for o in self.observations])

    @property
    def residuals(self) -> FloatArray:
        """Predicted over measured, less 1."""
        return self.predicted / self.measured - 1

    @property
    def median_residual(self) -> float:
        """The median of the residuals' sizes."""
        return float(np.median(np.abs(self.residuals)))

    @property
    def r_squared(self) -> float:
        """Share of the variance of the measured seconds that the model explains."""
        spread = float(((self.measured - self.measured.mean()) ** 2).sum())
        return 1 - float(((self.measured - self.predicted) ** 2).sum()) / spread if spread else 1.0


def fit_cost_model(
    observations: Sequence[Observation],
    *,
    efficiency: tuple[tuple[int, float], ...] = ((1, 1.0),),
    hop_bytes: float = 1.0,
    ranks_per_node: int | None = None,
) -> Fit:
    """Fit every coefficient of :class:`~lightning_dcp.schedule.CostModel` but the ones given.

    Minimizes the sum of squares of (predicted / measured - 1) with no coefficient below 0. The overlap is tried in
    steps of a tenth. Coefficients that the observations say nothing of (those of hops, on one rank) are 0.

    Args:
        observations: measured steps, of several lengths and CP sizes.
        efficiency: of the attention kernel, as the cost model has it.
        hop_bytes: bytes that a hop carries for each token of a shard. Only its ratio to the bandwidth is fitted, so the
            bandwidth also holds whatever else grows with (c - 1) / c times the tokens, such as gathering outputs.
        ranks_per_node: as in the cost model.

    Raises:
        ConfigurationError: the measured seconds do not grow with the tokens.
    """
    rows = _Rows(observations, efficiency, hop_bytes, ranks_per_node)
    best, best_error = rows.fit(0.0)
    for overlap in _OVERLAPS[1:] if any(o.cp_size > 1 for o in observations) else ():
        cost, error = rows.fit(overlap)
        if error < _WORTH_IT * best_error:
            best, best_error = cost, error
    return Fit(best, tuple(observations))


class _Rows:
    """One row an observation and one column a coefficient, before the overlap is known."""

    def __init__(
        self,
        observations: Sequence[Observation],
        efficiency: tuple[tuple[int, float], ...],
        hop_bytes: float,
        ranks_per_node: int | None,
    ) -> None:
        self.observations, self.hop_bytes = observations, hop_bytes
        self.fixed: dict[str, Any] = {"efficiency": efficiency, "ranks_per_node": ranks_per_node}
        self.unit = CostModel(linear=0.0, attention=1.0, **self.fixed)
        self.columns = np.array([self._row(o) for o in observations])
        self.seconds = np.array([o.seconds for o in observations])
        self.hops = np.array([o.cp_size - 1 for o in observations], dtype=np.float64)

    def _row(self, o: Observation) -> list[float]:
        tokens, hops = sum(o.samples) / o.cp_size, o.cp_size - 1
        attention = float(self.unit.attention_seconds(o.samples, o.cp_size).sum())
        transfer = [hops, hops * self.hop_bytes * tokens]
        spans = self.unit.spans_nodes(0, o.cp_size)
        transfers = [0.0, 0.0, *transfer] if spans else [*transfer, 0.0, 0.0]
        return [o.packs * value for value in (1.0, tokens, attention, *transfers)]

    def fit(self, overlap: float) -> tuple[CostModel, float]:
        """The best model with this overlap, and its sum of squares.

        Which hops are hidden altogether depends on the coefficients: they are fitted again until that settles.
        """
        hidden = np.zeros(len(self.seconds), dtype=bool)
        found: list[tuple[float, CostModel]] = []
        for _ in range(8):
            cost = self._cost(non_negative_least_squares(self._design(overlap, hidden), np.ones(len(hidden))), overlap)
            found.append((self._error(cost), cost))
            before, hidden = hidden, np.array([self._is_hidden(cost, o) for o in self.observations])
            if (before == hidden).all():
                break
        error, cost = min(found, key=lambda pair: pair[0])
        return cost, error

    def _design(self, overlap: float, hidden: NDArray[np.bool_]) -> FloatArray:
        """The columns over the measured seconds; attention hides its share of each hop that is not hidden whole."""
        design = self.columns.copy()
        saved = np.where(hidden, 0.0, overlap * self.hops / (self.hops + 1))
        design[:, _COLUMNS.index("attention")] *= 1 - saved
        design[hidden, _HOPS] = 0.0
        return design / self.seconds[:, None]

    def _cost(self, values: FloatArray, overlap: float) -> CostModel:
        named = dict(zip(_COLUMNS, values.tolist(), strict=True))
        if not named["linear"] + named["attention"]:
            raise ConfigurationError([_NO_GROWTH])
        if not self.columns[:, _COLUMNS.index("internode_latency")].any():  # nothing known: as inside a node
            named |= {"internode_latency": named["hop_latency"], "internode_bytes": named["hop_bytes"]}
        local, remote = named.pop("hop_bytes"), named.pop("internode_bytes")
        return CostModel(
            **named,
            hop_bytes=self.hop_bytes if self.hops.any() else 0.0,
            bandwidth=1 / local if local else _TOO_FAST_TO_SEE,
            internode_bandwidth=1 / remote if remote else _TOO_FAST_TO_SEE,
            overlap=overlap,
            **self.fixed,
        )

    def _error(self, cost: CostModel) -> float:
        predicted = np.array([o.predicted(cost) for o in self.observations])
        return float(((predicted / self.seconds - 1) ** 2).sum())

    def _is_hidden(self, cost: CostModel, o: Observation) -> bool:
        attention = float(cost.attention_seconds(o.samples, o.cp_size).sum())
        spans = cost.spans_nodes(0, o.cp_size)
        exposed = cost.exposed_seconds(o.cp_size, float(sum(o.samples)), attention, spans_nodes=spans)
        return o.cp_size > 1 and exposed == 0.0


def non_negative_least_squares(design: FloatArray, wanted: FloatArray) -> FloatArray:
    """Least squares with no negative value: the best of all sets of columns whose own solution is positive.

    All sets are tried, so there can be a dozen columns at most.

    Args:
        design: ``[rows, columns]``.
        wanted: ``[rows]``.
    """
    least = _NOTHING * float(np.linalg.norm(wanted))
    scale = np.linalg.norm(design, axis=0)
    usable = [i for i in range(design.shape[1]) if scale[i] > 0]
    best, best_error = np.zeros(design.shape[1]), float("inf")
    for columns in _subsets(usable):
        chosen = list(columns)
        values, *_ = np.linalg.lstsq(design[:, chosen] / scale[chosen], wanted, rcond=None)
        if (values < least).any():  # columns that add nothing are left to the sets without them
            continue
        error = float(((design[:, chosen] / scale[chosen] @ values - wanted) ** 2).sum())
        if error < best_error:
            best, best_error = np.zeros(design.shape[1]), error
            best[chosen] = values / scale[chosen]
    return best


def _subsets(items: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """All sets of one item or more, the largest first."""
    for size in range(len(items), 0, -1):
        yield from combinations(items, size)
