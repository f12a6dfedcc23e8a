"""No sample of a pack has any influence on another."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.attention.support import KERNELS, Case, Inputs, Round, attend_on
from tests.parallel.support import sample_slices
from tests.support.ranks import RankPool

PACK = Inputs((13, 29, 2, 7))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_other_values_in_the_first_sample_leave_the_rest_bit_identical(ranks: RankPool, size: int) -> None:
    cases = [Case(PACK, size, layout, kernel) for layout in ("zigzag", "random") for kernel in KERNELS]
    values = ("kept", "other", "nan")
    rounds: list[Round] = [
        {0: replace(case, inputs=replace(PACK, first_sample=first))} for case in cases for first in values
    ]
    got = [attended.arrays for _, attended in attend_on(ranks, size, rounds)]
    first, *others = sample_slices(PACK.lengths)
    for case, before, *changed in zip(cases, got[::3], got[1::3], got[2::3], strict=True):
        for after in changed:
            for name in before:
                assert not np.array_equal(before[name][first], after[name][first]), (name, case)
                for where in others:
                    assert np.array_equal(before[name][where], after[name][where]), (name, where, case)
