"""Low precision: dtypes are kept, and a larger group loses no more accuracy than a small one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.attention.support import KERNELS, Attended, Case, Inputs, Round, attend_on, dense_attention
from tests.support.ranks import RankPool

HALF = (torch.float16, torch.bfloat16)


def worst_errors(got: Attended, expected: dict[str, np.ndarray]) -> dict[str, float]:
    """Largest error of the output and of each gradient."""
    return {name: float(np.abs(got.arrays[name] - array).max()) for name, array in expected.items()}


@pytest.mark.parametrize("size", [1, 2])
def test_outputs_and_gradients_have_the_dtype_of_the_inputs(ranks: RankPool, size: int) -> None:
    dtypes = (*HALF, torch.float32)
    rounds: list[Round] = [
        {0: Case(Inputs((13, 7), dtype=dtype), size, kernel=kernel)} for dtype in dtypes for kernel in KERNELS
    ]
    for case, got in attend_on(ranks, size, rounds):
        assert got.dtypes == {case.inputs.dtype}, case
        expected = dense_attention(case.inputs)
        roundings = 4 if case.inputs.dtype in HALF else 16  # what is computed in float32 is rounded once, in the end
        for name, error in worst_errors(got, expected).items():
            tolerance = roundings * torch.finfo(case.inputs.dtype).eps * max(1.0, np.abs(expected[name]).max())
            assert error <= tolerance, (name, case)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
def test_the_error_does_not_grow_with_the_group(ranks: RankPool, kernel: str, dtype: torch.dtype) -> None:
    inputs = Inputs((257, 64, 257), dtype=dtype, source="mlp")
    rounds: list[Round] = [
        {first: Case(inputs, size, kernel=kernel) for first in range(0, 8, size)} for size in (2, 4, 8)
    ]
    errors = {case.size: worst_errors(got, dense_attention(inputs)) for case, got in attend_on(ranks, 8, rounds)}
    for name, error in errors[2].items():
        assert 0 < errors[4][name] <= 2 * error
        assert 0 < errors[8][name] <= 2 * error
