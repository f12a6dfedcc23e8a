"""One batch as the planners see it: samples by length, and what each costs at each CP size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from lightning_dcp.schedule.alignment import NO_ALIGNMENT, Alignment
from lightning_dcp.schedule.cost import CostModel, FloatArray

Sizes = NDArray[np.int64]
"""The CP size of each sample of a workload."""


class Workload:
    """The samples of a batch, longest first (ties: first in the batch first), with their costs.

    From here on a sample is known by its place in this order; ``order`` gives its index in the batch.

    Args:
        lengths: tokens of each sample of the batch.
        ranks: size of the plane.
        limit: most tokens a rank may hold of one micro-batch.
        cost: what packs cost.
        sizes: the CP sizes that may be used, ascending, each dividing the next.
        speeds: speed of each rank, or ``None`` if all are alike.
        alignment: the padding that samples and packs get. Samples count with it in all that depends on a CP size, and
            ``limit`` is what the limit asked for leaves room for.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        ranks: int,
        limit: int,
        cost: CostModel,
        sizes: tuple[int, ...],
        speeds: tuple[float, ...] | None = None,
        alignment: Alignment = NO_ALIGNMENT,
    ) -> None:
        self.ranks, self.limit, self.cost, self.sizes, self.speeds = ranks, alignment.limit(limit), cost, sizes, speeds
        self.alignment = alignment
        array = np.asarray(lengths, dtype=np.int64)
        ranked = np.argsort(-array, kind="stable")
        self.order: list[int] = ranked.tolist()
        self.tokens: NDArray[np.int64] = array[ranked]
        self.lengths: list[int] = self.tokens.tolist()
        self._padded: dict[int, list[int]] = {}
        self._attention: dict[int, list[float]] = {}
        self._shares: dict[int, list[float]] = {}
        self._coefficients: dict[tuple[int, bool], tuple[float, float, float, float]] = {}

    @cached_property
    def alone(self) -> dict[int, FloatArray]:
        """Seconds of each sample on each rank, alone in its pack, by size; infinite where it does not fit."""
        return {c: self._alone(c) for c in self.sizes}

    def padded(self, c: int) -> list[int]:
        """Tokens of each sample on c ranks, padding included."""
        if c not in self._padded:
            self._padded[c] = self.alignment.padded(self.tokens, c).tolist() if self.alignment else self.lengths
        return self._padded[c]

    def _alone(self, c: int) -> FloatArray:
        tokens = self.alignment.padded(self.tokens, c)
        seconds = self.cost.sample_seconds(tokens, c, spans_nodes=self.spans_nodes(c))
        return np.where(self.tokens <= c * self.limit, seconds, np.inf)

    def spans_nodes(self, c: int) -> bool:
        """Whether groups of this size have ranks in several nodes, or some of them do."""
        nodes = self.cost.ranks_per_node
        return nodes is not None and self.ranks > nodes and nodes % c != 0

    def share(self, c: int) -> list[float]:
        """Seconds that each sample adds to a pack on each rank of its group."""
        if c not in self._shares:
            tokens = self.alignment.padded(self.tokens, c)
            alone = self.cost.sample_seconds(tokens, c, spans_nodes=self.spans_nodes(c))
            self._shares[c] = (alone - self.cost.pack_overhead).tolist()
        return self._shares[c]

    def attention(self, c: int) -> list[float]:
        """Seconds of attention of each sample on each rank."""
        if c not in self._attention:
            self._attention[c] = self.cost.attention_seconds(self.alignment.padded(self.tokens, c), c).tolist()
        return self._attention[c]

    def coefficients(self, c: int, spans_nodes: bool) -> tuple[float, float, float, float]:
        """``(linear, latency, transfer, hidden)`` of packs on c ranks, for :meth:`seconds_of`."""
        key = (c, spans_nodes)
        if key not in self._coefficients:
            cost, hops = self.cost, c - 1
            latency_s, token_s = cost.hop_seconds(spans_nodes=spans_nodes)
            self._coefficients[key] = (cost.linear / c, hops * latency_s, hops * token_s / c, hops * cost.overlap / c)
        return self._coefficients[key]

    def seconds_of(self, c: int, tokens: int, attention: float) -> float:
        """Seconds of a pack of so many padded tokens and so much attention on each rank of its group, at speed 1.

        The cost model's formula with the constants taken out, for inner loops. Groups of a size that may span nodes
        count as if they did.
        """
        if self.alignment:
            tokens = self.alignment.in_pack(tokens, c)
        return self._seconds(self.coefficients(c, self.spans_nodes(c)), tokens, attention)

    def seconds_at(self, first: int, c: int, samples: Sequence[int]) -> float:
        """Seconds of a pack in its place: whether its group spans nodes and how fast its ranks are is known there."""
        coefficients = self.coefficients(c, self.cost.spans_nodes(first, c))
        lengths, attention = self.padded(c), self.attention(c)
        tokens = self.alignment.in_pack(sum([lengths[s] for s in samples]), c)
        seconds = self._seconds(coefficients, tokens, math.fsum([attention[s] for s in samples]))
        return seconds if self.speeds is None else seconds / min(self.speeds[first : first + c])

    def _seconds(self, coefficients: tuple[float, float, float, float], tokens: int, attention: float) -> float:
        linear, latency, transfer, hidden = coefficients
        exposed = latency + transfer * tokens - hidden * attention
        return self.cost.pack_overhead + linear * tokens + attention + (exposed if exposed > 0.0 else 0.0)

    def block_speeds(self, c: int) -> list[float]:
        """Speed of each block of c ranks: that of its slowest rank."""
        speeds = self.speeds or (1.0,) * self.ranks
        return [min(speeds[first : first + c]) for first in range(0, self.ranks, c)]

    def smallest_within(self, target: float) -> Sizes:
        """For each sample the smallest size that keeps it within a time, else the size at which it is quickest.

        Never more ranks than tokens, unless the limit forces it.
        """
        chosen = np.zeros(len(self.tokens), dtype=np.int64)
        quickest = np.full(len(self.tokens), np.inf)
        best = np.zeros(len(self.tokens), dtype=np.int64)
        for c in self.sizes:
            seconds = self.alone[c]
            useful = np.isfinite(seconds) & ((self.tokens >= c) | (best == 0))
            chosen = np.where((chosen == 0) & useful & (seconds <= target), c, chosen)
            better = useful & (seconds < quickest)
            best, quickest = np.where(better, c, best), np.where(better, seconds, quickest)
        return np.where(chosen == 0, best, chosen)
