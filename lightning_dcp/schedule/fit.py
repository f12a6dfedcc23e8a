"""Placement of few samples by best fit under a target time: each pack counts, and short samples may join long ones."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from lightning_dcp.schedule.placement import Block, Placement
from lightning_dcp.schedule.workload import Sizes, Workload

BISECTIONS = 6
"""How often the span between two step times is halved."""


@dataclass
class _Open:
    """A block of ranks and its packs so far; of the last one what decides whether more fits."""

    first: int
    c: int
    end: float
    samples: list[int] = field(default_factory=list)
    tokens: int = 0
    attention: float = 0.0

    @property
    def ranks(self) -> slice:
        return slice(self.first, self.first + self.c)

    def with_sample(self, sample: int, load: Workload) -> _Open:
        """The block with one more sample, in its last pack if there is room."""
        length, attention = load.padded(self.c)[sample], load.attention(self.c)[sample]
        end = self.end
        tokens, attention_s = length, attention
        if self.samples and self.tokens + length <= self.c * load.limit:
            end -= load.seconds_of(self.c, self.tokens, self.attention)
            tokens, attention_s = self.tokens + length, self.attention + attention
        end += load.seconds_of(self.c, tokens, attention_s)
        return _Open(self.first, self.c, end, [*self.samples, sample], tokens, attention_s)


def fit_search(load: Workload, sizes: Sizes, low: float, high: float) -> Placement | None:
    """The placement with the earliest end that best fit finds between two step times, or ``None``."""
    best = None
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        placed = fit(load, sizes, middle)
        if placed is None:
            low = middle
        else:
            best, high = placed, min(middle, placed.step)
    return best


def fit(load: Workload, sizes: Sizes, target: float) -> Placement | None:
    """Each sample, largest size and longest first, on the block that it fills best without passing the target.

    A sample may also join a block of a larger size, as long as no smaller pack follows on its ranks.
    """
    ends = [0.0] * load.ranks
    opened: dict[Block, _Open] = {}
    for c in reversed(load.sizes):
        for sample in np.flatnonzero(sizes == c).tolist():
            unopened = [_Open(f, c, max(ends[f : f + c])) for f in range(0, load.ranks, c) if (f, c) not in opened]
            usable = [b for b in opened.values() if max(ends[b.ranks]) <= b.end]
            grown = [block.with_sample(sample, load) for block in [*usable, *unopened]]
            fitting = [block for block in grown if block.end <= target]
            if not fitting:
                return None
            best = max(fitting, key=lambda block: block.end)
            opened[best.first, best.c] = best
            ends[best.ranks] = [best.end] * best.c
    ordered = sorted(opened.values(), key=lambda block: (-block.c, block.first))
    return Placement(ends, {(block.first, block.c): sorted(block.samples) for block in ordered})
