"""How fast each rank works, compared with what the others would need for the same work."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, product
from operator import mul

SUSPECTS = 4
"""Ranks that are looked at closely in one step, at most."""
DOUBT = 1.1
"""Of two ranks or more that take so many times the seconds expected, one may only look slow because of another."""
KINDS, LINEAR, DENSITY = 4, 1, 3
"""Kinds of work where densities count, and the places of two of them."""
PULL = 0.1
"""What a declared density weighs beside what is seen: the square of a rank's own share of that work, times this."""


@dataclass(frozen=True)
class Work:
    """What one rank did in one step.

    Attributes:
        step: number of the step.
        busy_s: seconds that it computed.
        parts: seconds that the cost model expects, by kind of work (overhead, linear, attention, and what densities
            add to the linear part).
    """

    step: int
    busy_s: float
    parts: tuple[float, ...]

    @cached_property
    def terms(self) -> tuple[float, ...]:
        """What this adds to the sums of least squares: products of two parts, and parts, in shares of the seconds it took."""
        shares = [part / self.busy_s for part in self.parts]
        return (*(a * b for a, b in product(shares, shares)), *shares)


@dataclass(frozen=True)
class Pace:
    """One step of one rank beside the others.

    Attributes:
        step: number of the step.
        busy_s: seconds that it computed.
        expected_s: seconds that the other ranks would have needed.
    """

    step: int
    busy_s: float
    expected_s: float

    @property
    def ratio(self) -> float:
        """How many times the expected seconds it took."""
        return self.busy_s / self.expected_s


def paces(history: Mapping[int, Sequence[Work]], watched: Collection[int] = ()) -> dict[int, tuple[Pace, ...]]:
    """The ranks that might be slow, and their paces over the steps given.

    Work is unequal on purpose, and a cost model may be wrong by any factor, and also in how it weighs attention against
    tokens and packs. So each kind of work gets a factor of its own: those that fit the other ranks' seconds best, relative
    to what they took (least squares, no factor negative). What these make of the rank's own work is what it should have
    taken, corrected by the median of what the others took of theirs.

    Args:
        history: for each rank its last steps with work.
        watched: ranks that are looked at, whatever they seem to be.
    """
    rows = {rank: [work for work in works if work.busy_s > 0 and any(work.parts)] for rank, works in history.items()}
    rows = {rank: works for rank, works in rows.items() if works}
    if len(rows) < 2:
        return {}
    sums = {rank: _normal_sums(works) for rank, works in rows.items()}
    total = [math.fsum(values) for values in zip(*sums.values(), strict=True)]
    overall = _fit(total)
    rough = {rank: _middle([w.busy_s / _seconds(overall, w) for w in works]) for rank, works in rows.items()}
    usual = _middle(list(rough.values()))
    suspects = sorted((rank for rank in rough if rough[rank] > usual), key=lambda rank: (-rough[rank], rank))[:SUSPECTS]
    suspects += [rank for rank in sorted(watched) if rank in rows and rank not in suspects]
    found = {rank: _paces_of(rank, rows, total, sums[rank]) for rank in suspects}
    slow = [rank for rank in suspects if _ratio(found[rank]) > DOUBT]
    if len(slow) < 2 or len(rows) < 4:
        return found
    return found | {rank: _without_others(rank, slow, found[rank], rows, sums) for rank in slow}


def _without_others(
    rank: int,
    slow: Sequence[int],
    paces: tuple[Pace, ...],
    rows: Mapping[int, Sequence[Work]],
    sums: Mapping[int, Sequence[float]],
) -> tuple[Pace, ...]:
    """The paces of a rank that seems slow, where it seems least so with any one other of those that seem slow left out.

    The seconds of a slow rank say wrong things of kinds of work that it has most of, by which a sound one can look slow.
    """
    best = paces
    for other in slow:
        if other != rank:
            rest = {place: works for place, works in rows.items() if place != other}
            total = [math.fsum(values) for values in zip(*(sums[place] for place in rest), strict=True)]
            best = min(best, _paces_of(rank, rest, total, sums[rank]), key=_ratio)
    return best


def _ratio(paces: Sequence[Pace]) -> float:
    return _middle([pace.ratio for pace in paces])


def _paces_of(
    rank: int, rows: Mapping[int, Sequence[Work]], total: Sequence[float], own: Sequence[float]
) -> tuple[Pace, ...]:
    factors = _with_densities([a - b for a, b in zip(total, own, strict=True)], own)
    others = [w.busy_s / _seconds(factors, w) for other, works in rows.items() if other != rank for w in works]
    usual = _middle(others)
    return tuple(Pace(w.step, w.busy_s, usual * _seconds(factors, w)) for w in rows[rank])


def _with_densities(sums: Sequence[float], own: Sequence[float]) -> tuple[float, ...]:
    """Factors that fit the others' seconds, that of densities drawn to that of tokens.

    A rank may hold all dense segments, so that nobody else's seconds say what these cost. Then they cost what was declared
    of them: as many times an ordinary token as their density says. The more the others hold, the less this counts.
    """
    factors, square = _fit(sums), DENSITY * KINDS + DENSITY
    if len(factors) < KINDS or own[square] == 0:
        return factors
    seen, declared = max(0.0, sums[square]), PULL * own[square]
    tokens = factors[LINEAR] or _scale(sums)
    return (*factors[:DENSITY], (seen * factors[DENSITY] + declared * tokens) / (seen + declared))


def _scale(sums: Sequence[float]) -> float:
    """The factor of all ordinary work together, where that of tokens cannot be told apart."""
    squares = math.fsum(sums[i * KINDS + j] for i, j in product(range(DENSITY), repeat=2))
    return math.fsum(sums[KINDS * KINDS : KINDS * KINDS + DENSITY]) / squares if squares > 0 else 1.0


def _normal_sums(works: Sequence[Work]) -> list[float]:
    """The sums of least squares over all steps of a rank."""
    return [math.fsum(column) for column in zip(*(work.terms for work in works), strict=True)]


def _fit(sums: Sequence[float]) -> tuple[float, ...]:
    """Factors from 0 on that leave the smallest sum of squares: the best of the fits of every set of kinds."""
    kinds = next(n for n in range(1, 8) if n * n + n == len(sums))
    squares = [list(sums[i * kinds : (i + 1) * kinds]) for i in range(kinds)]
    right = sums[kinds * kinds :]
    best, gain = (1.0,) * kinds, 0.0
    for chosen in _sets(kinds):
        found = _solve([[squares[i][j] for j in chosen] for i in chosen], [right[i] for i in chosen])
        if found is None or min(found) < 0:
            continue
        removed = math.fsum(x * right[i] for x, i in zip(found, chosen, strict=True))  # of the sum of squares
        if removed > gain:
            values = dict(zip(chosen, found, strict=True))
            best, gain = tuple(values.get(i, 0.0) for i in range(kinds)), removed
    return best


def _sets(kinds: int) -> Iterator[tuple[int, ...]]:
    for size in range(1, kinds + 1):
        yield from combinations(range(kinds), size)


def _solve(matrix: list[list[float]], right: list[float]) -> list[float] | None:
    """Solve a small symmetric system by elimination; None if it does not say enough."""
    size = len(right)
    scale = [math.sqrt(matrix[i][i]) for i in range(size)]
    if min(scale) == 0:
        return None
    rows = [[matrix[i][j] / (scale[i] * scale[j]) for j in range(size)] + [right[i] / scale[i]] for i in range(size)]
    for i in range(size):
        if rows[i][i] < 1e-6:  # of a diagonal of ones: two kinds of work that always go together
            return None
        for j in range(i + 1, size):
            factor = rows[j][i] / rows[i][i]
            rows[j] = [a - factor * b for a, b in zip(rows[j], rows[i], strict=True)]
    found = [0.0] * size
    for i in reversed(range(size)):
        rest = math.fsum(rows[i][j] * found[j] for j in range(i + 1, size))
        found[i] = (rows[i][size] - rest) / rows[i][i]
    return [value / s for value, s in zip(found, scale, strict=True)]


def _seconds(factors: Sequence[float], work: Work) -> float:
    """What these factors make of some work; above 0, also where a kind of work counts for nothing."""
    return max(math.fsum(map(mul, factors, work.parts)), 1e-9)


def _middle(values: Sequence[float]) -> float:
    """The median; of an even number the lower of the two in the middle."""
    return sorted(values)[(len(values) - 1) // 2]
