"""One process and many ranks agree, from the DataLoader to the optimizer step."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.ranks import RankPool
from tests.support.training import assert_same, fit

# Batches of six; at 16 tokens a rank, 60 needs four ranks of four, 30 needs two, the others one.
LENGTHS = [60, 3, 30, 7, 1, 12, 5, 29, 2, 61, 16, 9, 13, 40, 4, 4, 8, 30]


def test_first(ranks: RankPool) -> None:
    expected = ranks.run(fit, 1, LENGTHS, 6, strategy=None)[0]
    got = ranks.run(fit, 4, LENGTHS, 6, strategy={"max_seqlen_per_dp_cp_rank": 16})
    for own in got:
        print(own["losses"], expected["losses"], own["cp_sizes"], own["logged"], expected["logged"])
        assert_same(own, expected, 1e-9)
