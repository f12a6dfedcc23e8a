"""Planning for ranks in lock-step: in each micro-batch all ranks wait for the slowest pack."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from lightning_dcp.schedule.arrange import any_arrangement, arrange, even_out
from lightning_dcp.schedule.bins import Round, idle_seconds, step_seconds, take_places
from lightning_dcp.schedule.plan import MicroBatch, Pack
from lightning_dcp.schedule.workload import Sizes, Workload

ENOUGH, ENOUGH_OF_FEW = 1.02, 1.005
"""A step that takes at most so many times the lower bound is not worth another try; batches of few samples are tried
for longer."""
HARD = 1.03
"""A step that takes more than so many times the lower bound is worth other sizes for its longest samples."""
PROMISING = 1.03
"""An arrangement is worth evening out if it takes at most so many times the best one."""
SHARES_OF_ROUND = (1.8, 1.5, 2.1, 1.25, 1.0, 2.5, 0.7, 3.2)
"""How much longer than an average round one sample may take before it is cut further. Rounds of long samples only may
well be longer than others; smaller pieces share out more evenly."""
LONGEST = 8
"""How many of the longest samples are tried at other sizes."""
EVENED = 1024
"""Samples of a batch up to which every promising arrangement is evened out; of larger ones only the best is."""
FEW = 1024
"""Samples times ranks up to which a batch is tried for longer."""
FEWEST_TRIES, MOST_TRIES, TRIES_BY_SHARE = 6, 60, 160
"""How many arrangements are tried: ``TRIES_BY_SHARE`` over the samples a rank, since few are harder to share out."""


class Arrangement(NamedTuple):
    """Rounds, how long they take, and the sizes that they were made from."""

    seconds: float
    rounds: list[Round]
    sizes: Sizes


def plan_lockstep(load: Workload, bound: float, multiple: int = 1) -> Arrangement | None:
    """Rounds whose longest packs add up to little; ``None`` if no arrangement was found.

    Tries numbers of rounds and times that a sample may take in one; then other sizes for the longest samples.

    Args:
        load: the batch.
        bound: seconds that the step takes at least.
        multiple: the number of rounds must be a multiple of this.
    """
    search = _Search(load, bound)
    counts = _round_counts(load, multiple)
    for share in SHARES_OF_ROUND:
        for count in counts:
            if share <= 1.1 * count:  # no sample may take longer than the step
                search.attempt(load.smallest_within(bound / count * share), count)
    search.resize_longest()
    if search.best is None and (rounds := any_arrangement(load, multiple)) is not None:
        return Arrangement(step_seconds(rounds), rounds, load.smallest_within(math.inf))
    return search.evened()


def _round_counts(load: Workload, multiple: int) -> list[int]:
    """Numbers of rounds to try: a few more than the tokens need, and as many as long samples need.

    A sample over the limit of one rank fills its group, as few samples are short enough to share what is left there.
    """
    sizes = load.smallest_within(math.inf)
    tokens = load.padded(load.sizes[0])
    held = np.where(sizes > load.sizes[0], sizes * load.limit, tokens)
    capacity = load.ranks * load.limit * multiple
    fewest, roomy = -(-sum(tokens) // capacity), -(-int(held.sum()) // capacity)
    return [count * multiple for count in dict.fromkeys([fewest + 1, fewest + 2, fewest, roomy, roomy + 1])]


class _Search:
    """The best arrangement so far, and how many more may be tried."""

    def __init__(self, load: Workload, bound: float) -> None:
        self.load, self.bound = load, bound
        self.few = len(load.lengths) * load.ranks <= FEW
        self.good = bound * (ENOUGH_OF_FEW if self.few else ENOUGH)
        self.best: Arrangement | None = None
        by_share = TRIES_BY_SHARE * load.ranks // len(load.lengths)
        self.tries = max(FEWEST_TRIES, min(MOST_TRIES, by_share)) if len(load.lengths) <= EVENED else FEWEST_TRIES
        self.tried: set[tuple[int, bytes]] = set()

    @property
    def seconds(self) -> float:
        return math.inf if self.best is None else self.best.seconds

    @property
    def over(self) -> bool:
        return self.tries <= 0 or self.seconds <= self.good

    def attempt(self, sizes: Sizes, count: int) -> None:
        """Arrange the samples at these sizes in so many rounds, unless that has been done."""
        if self.over or (count, sizes.tobytes()) in self.tried:
            return
        self.tried.add((count, sizes.tobytes()))
        self.tries -= 1
        rounds = arrange(self.load, sizes, count)
        if rounds is None:
            return
        if len(self.load.lengths) <= EVENED and step_seconds(rounds) < self.seconds * PROMISING:
            rounds = even_out(self.load, rounds)
        if step_seconds(rounds) < self.seconds:
            self.best = Arrangement(step_seconds(rounds), rounds, sizes)

    def evened(self) -> Arrangement | None:
        """The best arrangement, evened out."""
        if self.best is None or len(self.load.lengths) <= EVENED:
            return self.best
        rounds = even_out(self.load, self.best.rounds)
        return Arrangement(step_seconds(rounds), rounds, self.best.sizes)

    def resize_longest(self) -> None:
        """Cut long samples of the best arrangement one size further, or one less, as long as that helps."""
        while self.best is not None and not self.over and (self.few or self.seconds > self.bound * HARD):
            before = self.best
            worst = max(range(len(before.rounds)), key=[idle_seconds(packs) for packs in before.rounds].__getitem__)
            longest_pack = max(before.rounds[worst], key=lambda b: b.end)
            longest = range(min(LONGEST, len(before.sizes)))
            for sample in dict.fromkeys([min(longest_pack.samples), *longest]):
                for c in self._neighbours(int(before.sizes[sample])):
                    if self.load.lengths[sample] <= c * self.load.limit:
                        sizes = before.sizes.copy()
                        sizes[sample] = c
                        self.attempt(sizes, len(before.rounds))
            if self.best is before:
                break

    def _neighbours(self, c: int) -> list[int]:
        """The next larger and the next smaller size."""
        at = self.load.sizes.index(c)
        return [*self.load.sizes[at + 1 : at + 2], *self.load.sizes[max(at - 1, 0) : at]]


def in_place(load: Workload, rounds: list[Round], layout: str) -> tuple[float, tuple[MicroBatch, ...]]:
    """The rounds as micro-batches of packs, each on its ranks, and the exact time of the step."""
    seconds = 0.0
    planned = []
    for packs in rounds:
        take_places(packs, load)
        placed = sorted(packs, key=lambda b: b.first)
        seconds += max([load.seconds_at(b.first, b.c, b.samples) for b in placed])
        planned.append(
            tuple(Pack(b.first, b.c, tuple(sorted([load.order[s] for s in b.samples])), layout) for b in placed)
        )
    return seconds, tuple(planned)
