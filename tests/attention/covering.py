"""Covering designs: few combinations in which each value of a factor meets each value of every other."""

from __future__ import annotations

import random
from collections.abc import Hashable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

Row = dict[str, Any]
Pair = tuple[str, Hashable, str, Hashable]


def covering(factors: Mapping[str, Sequence[Hashable]], seed: int = 0, tries: int = 12) -> list[Row]:
    """Rows with one value of each factor, such that every pair of values of two factors is in one of them.

    Greedy: each row holds a pair not met yet, and is the best of some random ones that do.
    """
    draw = random.Random(seed)
    left = dict.fromkeys((a, x, b, y) for a, b in combinations(factors, 2) for x, y in product(factors[a], factors[b]))
    rows = []
    while left:
        a, x, b, y = next(iter(left))
        candidates = [
            {name: draw.choice(values) for name, values in factors.items()} | {a: x, b: y} for _ in range(tries)
        ]
        row = max(candidates, key=lambda candidate: sum(pair in left for pair in pairs_of(candidate)))
        for pair in pairs_of(row):
            left.pop(pair, None)
        rows.append(row)
    return rows


def pairs_of(row: Row) -> list[Pair]:
    """The pairs of values that a row holds."""
    return [(a, row[a], b, row[b]) for a, b in combinations(row, 2)]
