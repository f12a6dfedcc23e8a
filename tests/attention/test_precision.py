"""Low precision: dtypes are kept, and a larger group loses no more accuracy than a small one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.attention.dense import Inputs, dense_attention
from tests.attention.support import KERNELS, SCHEMES, Attended, Case, Round, attend_on, attend_played
from tests.support.ranks import RankPool

HALF = (torch.float16, torch.bfloat16)


def worst_errors(got: Attended, expected: dict[str, np.ndarray]) -> dict[str, float]:
    """Largest error of the output and of each gradient."""
    return {name: float(np.abs(got.arrays[name] - array).max()) for name, array in expected.items()}


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_outputs_and_gradients_have_the_dtype_of_the_inputs(scheme: str, size: int) -> None:
    for dtype in (*HALF, torch.float32):
        for kernel in KERNELS:
            case = Case(Inputs((13, 7), dtype=dtype), size, kernel=kernel, scheme=scheme)
            got, expected = attend_played(case), dense_attention(case.inputs)
            assert got.dtypes == {dtype}, case
            roundings = 4 if dtype in HALF else 16  # what is computed in float32 is rounded once, in the end
            for name, error in worst_errors(got, expected).items():
                tolerance = roundings * torch.finfo(dtype).eps * max(1.0, np.abs(expected[name]).max())
                assert error <= tolerance, (name, case)


LONG = Inputs((257, 64, 257), source="mlp")
OWN_KEYS = replace(LONG, heads=8, kv_heads=8)
"""With a key head for each of eight ranks."""


def errors_by_size(inputs: Inputs, scheme: str, kernel: str) -> list[dict[str, float]]:
    """The largest errors in groups of 2, of 4 and of 8."""
    expected = dense_attention(inputs)
    cases = (Case(inputs, size, kernel=kernel, scheme=scheme) for size in (2, 4, 8))
    return [worst_errors(attend_played(case), expected) for case in cases]


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_error_does_not_grow_with_the_group(scheme: str, kernel: str, dtype: torch.dtype) -> None:
    inputs = replace(OWN_KEYS if scheme == "ulysses" else LONG, dtype=dtype)
    two, four, eight = errors_by_size(inputs, scheme, kernel)
    for name, error in two.items():
        assert 0 < four[name] <= 2 * error
        assert 0 < eight[name] <= 2 * error


@pytest.mark.parametrize("kernel", KERNELS)
def test_key_heads_that_ranks_share_are_rounded_once_more_only_by_kernels_that_round(kernel: str) -> None:
    """Such a kernel rounds its part of their gradient; the parts are added in float32, and the sum is rounded."""
    inputs = replace(LONG, dtype=torch.bfloat16)
    two, four, eight = errors_by_size(inputs, "ulysses", kernel)
    for name, error in two.items():
        growth = 3 if kernel == "varlen" and name in ("dk", "dv") else 2
        assert 0 < four[name] <= growth * error
        assert 0 < eight[name] <= growth * error


def test_the_error_does_not_grow_with_the_group_on_ranks(ranks: RankPool) -> None:
    inputs = replace(OWN_KEYS, dtype=torch.bfloat16)
    rounds: list[Round] = [{8 - size: Case(inputs, size, scheme=scheme)} for size in (2, 8) for scheme in SCHEMES]
    errors = {
        (case.size, case.scheme): worst_errors(got, dense_attention(inputs))
        for case, got in attend_on(ranks, 8, rounds)
    }
    for scheme in SCHEMES:
        for name, error in errors[2, scheme].items():
            assert 0 < errors[8, scheme][name] <= 2 * error
