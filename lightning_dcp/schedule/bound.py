"""A time that no plan can beat, whatever it does."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_dcp.schedule.alignment import NO_ALIGNMENT, Alignment
from lightning_dcp.schedule.cost import CostModel, FloatArray
from lightning_dcp.schedule.plan import Mode


def lower_bound_s(
    lengths: Sequence[int],
    ranks: int,
    max_seqlen_per_dp_cp_rank: int,
    cost: CostModel,
    *,
    sizes: Sequence[int],
    mode: Mode = "free",
    speeds: Sequence[float] | None = None,
    alignment: Alignment = NO_ALIGNMENT,
) -> float:
    """Seconds that a step takes at least.

    In a step of T seconds no sample uses a size at which it alone takes longer than T. So T is too short as long as the
    cheapest work under that rule, over all ranks, takes longer; the bound is the smallest T that is not. Work is

    - compute of each sample at its size;
    - one pack overhead for each pack that a rank needs at least, see :func:`_packs_needed`;
    - transfers as far as they must be seen. Those of a pack on c ranks that compute does not hide are
      ``max(0, (c - 1) * sum(x_s))`` with ``x_s`` the transfer of a sample less what its own attention hides. As
      ``max(0, x) >= x`` and ``max(0, x) >= 0``, their sum over packs is at least that over samples of ``x_s`` for the
      sizes up to any k and of 0 for those above; the best k is taken (short samples hide nothing, long ones hide
      others').

    Args:
        lengths: tokens of each sample.
        ranks: size of the plane.
        max_seqlen_per_dp_cp_rank: most tokens a rank may hold of one micro-batch.
        cost: what packs cost.
        sizes: the CP sizes that may be used, ascending.
        mode: ``free`` or ``lockstep``.
        speeds: speed of each rank; by default all 1.0.
        alignment: the padding that samples get; that of packs is not counted.
    """
    fastest = sorted(speeds, reverse=True) if speeds is not None else [1.0] * ranks
    tokens = np.asarray(lengths, dtype=np.int64)
    limit = alignment.limit(max_seqlen_per_dp_cp_rank)
    problem = _Problem(tokens, ranks, limit, cost, tuple(sizes), mode, fastest, alignment)
    rounds = _LongRound(problem, tokens, sizes) if mode == "lockstep" and speeds is None else None
    low = max(problem.quickest, problem.needed(math.inf))
    problem.fix_samples_that_may_use_any_size(low)
    high = low
    while problem.needed(high) > high:
        low, high = high, high * 1.02
    while high - low > low * PRECISION:
        middle = (low + high) / 2
        if problem.needed(middle) <= middle:
            high = middle
        else:
            low = middle
    bound = max(low, min(high, problem.needed(high)))
    return max(bound, *map(rounds.with_sample, rounds.longest())) if rounds else bound


PRECISION = 1e-4
"""How closely the smallest T is looked for; what is returned is not above it."""


class _Problem:
    """What a step of at most T seconds needs, as a function of T that never rises."""

    def __init__(
        self,
        tokens: NDArray[np.int64],
        ranks: int,
        limit: int,
        cost: CostModel,
        sizes: tuple[int, ...],
        mode: Mode,
        speeds: list[float],
        alignment: Alignment,
    ) -> None:
        self.total, self.ranks, self.limit, self.cost, self.mode, self.speeds = (
            int(tokens.sum()),
            ranks,
            limit,
            cost,
            mode,
            speeds,
        )
        table = [_at_size(alignment.padded(tokens, c), c, limit, cost, speeds[c - 1]) for c in sizes]
        self.alone = np.array([row.alone for row in table])
        self.hidden = np.array([row.hidden for row in table])
        self.seen = np.array([row.seen for row in table])
        self.fixed = [0.0] * (len(sizes) + 1)
        self.quickest = float(self.alone.min(axis=0).max())

    def needed(self, step: float) -> float:
        """Seconds that the work takes if no sample may take longer than ``step``."""
        packs = _packs_needed(self, step)
        work = max(map(float.__add__, self._works(step), self.fixed))
        return (work + packs * self.cost.pack_overhead) / math.fsum(self.speeds)

    def _works(self, step: float) -> list[float]:
        """Rank-seconds of all samples, transfers seen for the first k sizes and hidden for the rest, for each k."""
        hidden = np.where(self.alone <= step, self.hidden, np.inf)
        seen = np.where(self.alone <= step, self.seen, np.inf)
        sums = []
        for k in range(len(hidden) + 1):
            least = np.concatenate([seen[:k], hidden[k:]]).min(axis=0, initial=np.inf)
            sums.append(math.fsum(least.tolist()))
        return sums

    def fix_samples_that_may_use_any_size(self, step: float) -> None:
        """Add up, once and for all, samples of which no size takes longer than ``step``; they need no further look."""
        free = (np.where(np.isfinite(self.alone), self.alone, 0.0) <= step).all(axis=0)
        every = self.alone, self.hidden, self.seen
        self.alone, self.hidden, self.seen = (rows[:, free] for rows in every)
        self.fixed = self._works(math.inf)
        self.alone, self.hidden, self.seen = (rows[:, ~free] for rows in every)


class _LongRound:
    """What lock-step adds: while a long sample runs on c ranks, the others can only do what fits in one round.

    If the sample takes a seconds on c ranks, its round takes a at least, and the other R - c ranks hold at most
    ``(R - c) * limit`` tokens in it, at best those that cost most. Whatever time these leave is lost to the step.
    """

    SAMPLES = 4

    def __init__(self, problem: _Problem, tokens: NDArray[np.int64], sizes: Sequence[int]) -> None:
        self.problem, self.sizes, self.tokens = problem, sizes, tokens
        self.alone, self.hidden = problem.alone, problem.hidden
        self.cheapest = problem.hidden.min(axis=0)
        self.total = math.fsum(self.cheapest.tolist()) + _packs_needed(problem, math.inf) * problem.cost.pack_overhead
        self.dense = np.argsort(-(self.cheapest / tokens), kind="stable")

    def longest(self) -> list[int]:
        """The samples worth a look."""
        return np.argsort(-self.tokens, kind="stable")[: self.SAMPLES].tolist()

    def with_sample(self, sample: int) -> float:
        """Seconds of a step with the round of this sample, at the size where that is shortest."""
        others = self.dense[self.dense != sample]
        held = np.concatenate([[0], np.cumsum(self.tokens[others])])
        done = np.concatenate([[0.0], np.cumsum(self.cheapest[others])])
        ranks, limit, overhead = self.problem.ranks, self.problem.limit, self.problem.cost.pack_overhead
        steps = []
        for number, c in enumerate(self.sizes):
            alone = float(self.alone[number, sample])
            if not math.isfinite(alone):
                continue
            beside = self._most_work((ranks - c) * limit, held, done) + (ranks - c) * overhead
            lost = max(0.0, (ranks - c) * alone - beside)
            work = self.total - float(self.cheapest[sample]) + float(self.hidden[number, sample])
            steps.append((work + lost) / ranks)
        return min(steps)

    @staticmethod
    def _most_work(room: int, held: NDArray[np.int64], done: FloatArray) -> float:
        """Most work in so many tokens, if samples can be taken in parts: the densest first."""
        full = int(np.searchsorted(held, room, side="right")) - 1
        if full == len(held) - 1:
            return float(done[-1])
        part = (room - int(held[full])) / int(held[full + 1] - held[full])
        return float(done[full]) + part * float(done[full + 1] - done[full])


class _AtSize(NamedTuple):
    """Samples at one CP size: seconds alone, and rank-seconds of work without and with unhidden transfers."""

    alone: FloatArray
    hidden: FloatArray
    seen: FloatArray


def _at_size(tokens: NDArray[np.int64], c: int, limit: int, cost: CostModel, speed: float) -> _AtSize:
    nodes = cost.ranks_per_node is not None and c > cost.ranks_per_node
    attention = cost.attention_seconds(tokens, c)
    work = cost.linear * tokens + attention * c
    latency = cost.exposed_seconds(c, 0.0, 0.0, spans_nodes=nodes)  # of a pack, shared by the tokens it can hold
    transfers = cost.unhidden_seconds(tokens, attention, c, spans_nodes=nodes) * c + latency * tokens / limit
    alone = cost.sample_seconds(tokens, c, spans_nodes=nodes) / speed
    fits = tokens <= c * limit
    return _AtSize(*(np.where(fits, seconds, np.inf) for seconds in (alone, work, work + transfers)))


def _packs_needed(problem: _Problem, step: float) -> float:
    """Packs of all ranks together that a step of ``step`` seconds has at least, a pack of c ranks counting c times.

    A rank with n packs holds at most ``n * limit`` tokens, and at most as many as their linear work leaves time for. So
    each rank takes as many full packs as the time allows, and the tokens left over need one more pack each on as many
    ranks as it takes. In lock-step all ranks run the same number of packs.
    """
    least = math.ceil(problem.total / problem.limit)
    overhead, linear = problem.cost.pack_overhead, problem.cost.linear
    if problem.mode == "lockstep":
        return problem.ranks * math.ceil(least / problem.ranks)
    if not math.isfinite(step) or linear == 0 or min(problem.speeds) != max(problem.speeds):
        return least
    seconds = step * problem.speeds[0]
    full = int(seconds / (overhead + linear * problem.limit))
    left = problem.total - problem.ranks * full * problem.limit
    if left <= 0:
        return least
    more = (seconds - overhead * (full + 1)) / linear - full * problem.limit  # tokens that one more pack makes room for
    packs = problem.ranks * full + (math.ceil(left / more) if more > 0 else math.inf)
    return packs if packs <= problem.ranks * (full + 1) else math.inf
