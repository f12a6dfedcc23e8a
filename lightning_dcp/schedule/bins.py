"""Packs under construction: a lock-step round is a set of them that covers the plane."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from lightning_dcp.schedule.workload import Workload


@dataclass
class Bin:
    """A pack that still takes samples.

    Attributes:
        c: ranks of its group.
        samples: what it holds, by place in the workload's order.
        tokens: of these samples, padding included.
        attention: seconds of attention on each rank.
        seconds: of the whole pack on each rank, at speed 1.
        speed: of its slowest rank.
        target: seconds that its round takes anyway; up to there a sample costs nothing.
        first: its first rank, once it has a place.
    """

    c: int
    samples: list[int] = field(default_factory=list)
    tokens: int = 0
    attention: float = 0.0
    seconds: float = 0.0
    speed: float = 1.0
    target: float = 0.0
    first: int = 0

    def add(self, sample: int, load: Workload) -> None:
        """Take one sample."""
        self.samples.append(sample)
        self.tokens += load.padded(self.c)[sample]
        self.attention += load.attention(self.c)[sample]
        self.seconds = load.seconds_of(self.c, self.tokens, self.attention)

    def with_samples(self, samples: Iterable[int], load: Workload) -> Bin:
        """A bin of the same size and place that holds these samples instead."""
        other = Bin(self.c, speed=self.speed, target=self.target, first=self.first)
        for sample in samples:
            other.add(sample, load)
        return other

    def has_room(self, sample: int, load: Workload) -> bool:
        """Whether a sample keeps it within its token limit."""
        return self.tokens + load.padded(self.c)[sample] <= self.c * load.limit

    @property
    def end(self) -> float:
        """Seconds at the group's own speed."""
        return self.seconds / self.speed

    @property
    def slack(self) -> float:
        """Seconds past the target; negative while there is time left."""
        return self.end - self.target


Round = list[Bin]
"""The packs of one micro-batch."""


def round_seconds(packs: Round) -> float:
    """Seconds of a round: those of its longest pack."""
    return max([b.end for b in packs])


def step_seconds(rounds: list[Round]) -> float:
    """Seconds of all rounds, one after another."""
    return math.fsum([round_seconds(packs) for packs in rounds])


def idle_seconds(packs: Round) -> float:
    """Rank-seconds in which ranks wait for the longest pack of their round."""
    longest = round_seconds(packs)
    return math.fsum([(longest - b.end) * b.c for b in packs])


def distribute(bins: Iterable[Bin], ranks: int, count: int) -> list[Round] | None:
    """Bins into at most ``count`` rounds, the longest together; ``None`` if they need more.

    Sizes divide one another, so the room that is left in a round is a multiple of any size that still fits: a round
    fills up exactly, or nothing small enough is left.
    """
    queues: dict[int, list[Bin]] = {}
    for b in sorted(bins, key=lambda b: b.end):
        queues.setdefault(b.c, []).append(b)
    rounds: list[Round] = []
    while any(queues.values()):
        if len(rounds) == count:
            return None
        room, own = ranks, []
        while fitting := [c for c, queue in queues.items() if queue and c <= room]:
            own.append(queues[max(fitting, key=lambda c: (queues[c][-1].end, c))].pop())
            room -= own[-1].c
        rounds.append(own)
    return rounds + [[] for _ in range(count - len(rounds))]


def take_places(packs: Round, load: Workload) -> None:
    """Give each bin of a round its ranks: large groups first, and of one size the longest the fastest ranks."""
    free = [True] * load.ranks
    for c in reversed(load.sizes):
        own = [b for b in packs if b.c == c]
        if not own:
            continue
        speeds = load.block_speeds(c)
        places = [n for n in range(load.ranks // c) if free[n * c]]
        places.sort(key=lambda n: -speeds[n])
        for b, n in zip(sorted(own, key=lambda b: -b.seconds), places, strict=False):
            b.first, b.speed = n * c, speeds[n]
            free[n * c : (n + 1) * c] = [False] * c
