"""Batches of varied composition, of the lengths that a user's data has."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_LEANINGS = (0.4, 1.0, 2.5)
"""Powers that make long samples likelier than in the data, as likely, and rarer."""


def varied_batches(
    lengths: Sequence[int], batch_size: int, count: int, *, longest: int, seed: int = 0
) -> list[tuple[int, ...]]:
    """Draw batches of a quarter of the batch size up to all of it, some of mostly long samples, some of short ones.

    Args:
        lengths: tokens of real samples, in any order.
        batch_size: samples of a batch of the user's.
        count: how many batches; all are different.
        longest: samples are cut at this many tokens.
        seed: of the draw.
    """
    pool = np.minimum(np.sort(np.asarray(lengths, dtype=np.int64)), longest)
    random = np.random.default_rng(seed)
    found: dict[tuple[int, ...], None] = {}
    while len(found) < count:
        samples = int(random.integers(max(1, batch_size // 4), batch_size + 1))
        places = random.random(samples) ** random.choice(_LEANINGS)
        batch = tuple(pool[(places * len(pool)).astype(np.int64)].tolist())
        while batch in found:  # data of few different lengths
            batch = (*batch, int(random.choice(pool)))
        found[batch] = None
    return list(found)
