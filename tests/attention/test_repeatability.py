"""Two runs give the same bits."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch

from tests.attention.dense import KINDS, Inputs
from tests.attention.support import KERNELS, SCHEMES, Case, Round, attend_on
from tests.support.ranks import RankPool


@pytest.mark.slow
def test_two_runs_are_bit_identical(ranks: RankPool) -> None:
    ways = product(SCHEMES, KERNELS, (torch.float32, torch.bfloat16), ("causal", "everything at once"))
    rounds: list[Round] = [
        {0: Case(Inputs((64, 13, 90), 1 + (scheme != "ring"), dtype=dtype), 4, "zigzag", kernel, scheme, KINDS[kind])}
        for scheme, kernel, dtype, kind in ways
        if kernel != "cpu_flash" or not KINDS[kind].softcap
    ]
    first, second = (list(attend_on(ranks, 4, rounds)) for _ in range(2))
    assert len(first) == len(rounds)
    for (case, own), (_, other) in zip(first, second, strict=True):
        for name, array in own.arrays.items():
            assert np.array_equal(array, other.arrays[name]), (name, case)
