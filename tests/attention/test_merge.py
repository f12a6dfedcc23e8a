"""Joining partial results by their logsumexp."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lightning_dcp.attention.merge import merge_


def merged(first: tuple[float, float], second: tuple[float, float], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Out and lse of two partial results ``(lse, out)``."""
    out, lse = torch.full((1, 1, 1), first[1], dtype=dtype), torch.full((1, 1), first[0], dtype=dtype)
    merge_(out, lse, torch.full((1, 1, 1), second[1], dtype=dtype), torch.full((1, 1), second[0], dtype=dtype))
    return out, lse


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("order", [1, -1])
def test_a_part_of_far_greater_weight_wins_without_overflow(dtype: torch.dtype, order: int) -> None:
    out, lse = merged(*[(0.0, 1.0), (200.0, 5.0)][::order], dtype)
    assert out.item() == 5.0
    assert lse.item() == 200.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("order", [1, -1])
def test_parts_weigh_as_their_sums_of_exponentials(dtype: torch.dtype, order: int) -> None:
    out, lse = merged(*[(0.0, 1.0), (math.log(3), 5.0)][::order], dtype)
    tolerance = 4 * torch.finfo(dtype).eps
    assert out.item() == pytest.approx(4.0, rel=tolerance)
    assert lse.item() == pytest.approx(math.log(4), rel=tolerance)


def test_nothing_joined_with_something_is_that() -> None:
    out, lse = merged((-math.inf, 0.0), (-3.5, 7.0), torch.float32)
    assert (out.item(), lse.item()) == (7.0, -3.5)


def test_something_joined_with_nothing_stays() -> None:
    out, lse = merged((-3.5, 7.0), (-math.inf, 0.0), torch.float32)
    assert (out.item(), lse.item()) == (7.0, -3.5)


def test_parts_of_lower_precision_are_joined_in_the_higher_one_and_in_place() -> None:
    torch.manual_seed(0)
    out, lse = torch.randn(5, 2, 3), torch.randn(5, 2)
    other, other_lse = torch.randn(5, 2, 3).bfloat16(), torch.randn(5, 2)
    weights = torch.stack([lse, other_lse]).softmax(0).unsqueeze(-1)
    expected, expected_lse = weights[0] * out + weights[1] * other.float(), torch.logaddexp(lse, other_lse)
    storage = out.data_ptr(), lse.data_ptr()
    merge_(out, lse, other, other_lse)
    assert (out.data_ptr(), lse.data_ptr()) == storage
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_parts_joined_in_any_order_give_the_whole(order: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    scores, values = 9 * torch.randn(4, 12, dtype=torch.float64), torch.randn(12, 3, dtype=torch.float64)
    out, lse = torch.zeros(4, 1, 3, dtype=torch.float64), torch.full((4, 1), -math.inf, dtype=torch.float64)
    for i in order:
        part = slice(4 * i, 4 * i + 4)
        merge_(out, lse, (scores[:, part].softmax(-1) @ values[part])[:, None], scores[:, part].logsumexp(-1)[:, None])
    torch.testing.assert_close(out[:, 0], scores.softmax(-1) @ values, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse[:, 0], scores.logsumexp(-1), rtol=1e-12, atol=1e-12)
