"""The gradient sum over a plane."""

from __future__ import annotations

from collections.abc import Sequence
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_dcp.parallel.clock import WaitClock
from lightning_dcp.parallel.gradients import BUCKET_BYTES, all_reduce_gradients
from lightning_dcp.parallel.groups import ParallelGroups
from tests.parallel.support import join_world
from tests.support.ranks import RankPool

SHAPES = [(5,), (2, 3), (), (7,), (3, 1, 2)]
Grads = list[np.ndarray | None]


def parameters(dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES]


def filled(shape: tuple[int, ...], rank: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """A gradient of small whole numbers, different on every rank and exact in any dtype and order."""
    return torch.arange(int(np.prod(shape)), dtype=dtype).reshape(shape) + 10 * (rank + 1)


def total(shape: tuple[int, ...], ranks: range) -> np.ndarray:
    return sum(filled(shape, rank).numpy() for rank in ranks)


def reduced(params: list[nn.Parameter], groups: ParallelGroups, bucket_bytes: int = BUCKET_BYTES) -> Grads:
    all_reduce_gradients(params, groups.plane, WaitClock(), bucket_bytes=bucket_bytes)
    return [None if p.grad is None else p.grad.double().numpy() for p in params]


def _all_used(bucket_bytes: int) -> Grads:
    groups = join_world()
    params = parameters()
    for p in params:
        p.grad = filled(p.shape, groups.rank)
    return reduced(params, groups, bucket_bytes)


# 8 bytes hold no gradient but the scalar; 110 bytes hold some of them together.
@pytest.mark.parametrize("bucket_bytes", [8, 110, BUCKET_BYTES])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_rank_gets_the_sum_whatever_the_buckets_are(ranks: RankPool, world: int, bucket_bytes: int) -> None:
    for grads in ranks.run(_all_used, world, bucket_bytes):
        for grad, shape in zip(grads, SHAPES, strict=True):
            np.testing.assert_array_equal(grad, total(shape, range(world)))


def _used_in_part(bucket_bytes: int) -> tuple[Grads, list[bool]]:
    groups = join_world()
    params = parameters()
    users = [range(3), (), (1,), (0, 2), ()]
    for p, by in zip(params, users, strict=True):
        p.grad = filled(p.shape, groups.rank) if groups.rank in by else None
    params[4].requires_grad_(False)
    params[4].grad = filled(params[4].shape, groups.rank)
    return reduced(params, groups, bucket_bytes), [p.grad is None for p in params]


@pytest.mark.parametrize("bucket_bytes", [8, BUCKET_BYTES])
def test_what_some_ranks_used_is_summed_and_what_none_used_or_trains_is_left_alone(
    ranks: RankPool, bucket_bytes: int
) -> None:
    for rank, (grads, missing) in enumerate(ranks.run(_used_in_part, 3, bucket_bytes)):
        assert missing == [False, True, False, False, False]
        np.testing.assert_array_equal(grads[0], total(SHAPES[0], range(3)))
        np.testing.assert_array_equal(grads[2], total(SHAPES[2], range(1, 2)))
        np.testing.assert_array_equal(grads[3], total(SHAPES[3], range(0, 3, 2)))
        np.testing.assert_array_equal(grads[4], filled(SHAPES[4], rank).numpy())  # frozen: stays the rank's own


def _mixed_dtypes(bucket_bytes: int) -> tuple[Grads, list[torch.dtype]]:
    groups = join_world()
    dtypes = [torch.float32, torch.bfloat16, torch.float32, torch.float64, torch.bfloat16]
    params = [nn.Parameter(torch.zeros(shape, dtype=d)) for shape, d in zip(SHAPES, dtypes, strict=True)]
    for i, p in enumerate(params):
        if i != groups.rank:  # each of the first ranks did not use one of them
            p.grad = filled(p.shape, groups.rank, p.dtype)
    return reduced(params, groups, bucket_bytes), [p.grad.dtype == p.dtype for p in params]


@pytest.mark.parametrize("bucket_bytes", [8, BUCKET_BYTES])
def test_parameters_of_several_dtypes_keep_them(ranks: RankPool, bucket_bytes: int) -> None:
    for grads, kept in ranks.run(_mixed_dtypes, 2, bucket_bytes):
        assert all(kept)
        for i, (grad, shape) in enumerate(zip(grads, SHAPES, strict=True)):
            users = range(2) if i > 1 else range(1 - i, 2 - i)
            np.testing.assert_array_equal(grad, total(shape, users))


def _non_contiguous() -> tuple[Grads, list[tuple[bool, bool]]]:
    groups = join_world()
    matrix, image = nn.Parameter(torch.zeros(3, 4).double().T), nn.Parameter(torch.zeros(2, 3, 4, 4).double())
    matrix.grad = filled((4, 3), groups.rank).T.contiguous().T
    image.grad = filled((2, 3, 4, 4), groups.rank).to(memory_format=torch.channels_last)
    before = [p.grad for p in (matrix, image)]
    grads = reduced([matrix, image], groups)
    same = [p.grad is g for p, g in zip((matrix, image), before, strict=True)]
    return grads, [(s, not g.is_contiguous()) for s, g in zip(same, before, strict=True)]


def test_gradients_of_any_strides_are_summed_in_place(ranks: RankPool) -> None:
    for grads, facts in ranks.run(_non_contiguous, 2):
        np.testing.assert_array_equal(grads[0], total((4, 3), range(2)))
        np.testing.assert_array_equal(grads[1], total((2, 3, 4, 4), range(2)))
        assert facts == [(True, True), (True, True)]


def _tensor_parallel_planes() -> Grads:
    groups = join_world(tensor_parallel=2)
    params = parameters()
    for p in params:
        p.grad = filled(p.shape, dist.get_rank())
    return reduced(params, groups)


def test_only_ranks_of_one_plane_are_summed(ranks: RankPool) -> None:
    for rank, grads in enumerate(ranks.run(_tensor_parallel_planes, 4)):
        for grad, shape in zip(grads, SHAPES, strict=True):
            np.testing.assert_array_equal(grad, total(shape, range(rank % 2, 4, 2)))


def _reductions(dtypes: Sequence[torch.dtype], bucket_bytes: int) -> tuple[list[tuple[torch.dtype, int]], float]:
    """Dtype and numbers of each reduction but the first, which tells what was used; and the time waited."""
    groups = join_world()
    params = [nn.Parameter(torch.zeros(shape, dtype=d)) for shape, d in zip(SHAPES, dtypes, strict=True)]
    for p in params:
        p.grad = torch.ones_like(p)
    clock = WaitClock()
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduce:
        all_reduce_gradients(params, groups.plane, clock, bucket_bytes=bucket_bytes)
    return [(call.args[0].dtype, call.args[0].numel()) for call in all_reduce.call_args_list[1:]], clock.seconds


@pytest.mark.parametrize(("bucket_bytes", "sizes"), [(8, [5, 6, 1, 7, 6]), (110, [12, 13]), (BUCKET_BYTES, [25])])
def test_gradients_share_buckets_as_far_as_these_hold_them(
    ranks: RankPool, bucket_bytes: int, sizes: list[int]
) -> None:
    for reductions, seconds in ranks.run(_reductions, 2, [torch.float64] * 5, bucket_bytes):
        assert reductions == [(torch.float64, size) for size in sizes]
        assert seconds > 0


def test_each_dtype_is_reduced_for_itself(ranks: RankPool) -> None:
    wide, half = torch.float32, torch.bfloat16
    for reductions, _ in ranks.run(_reductions, 2, [wide, half, wide, half, half], BUCKET_BYTES):
        assert reductions == [(wide, 6), (half, 19)]


def _nothing_to_sum() -> Grads:
    groups = join_world()
    all_reduce_gradients([], groups.plane, WaitClock())
    frozen = nn.Parameter(torch.zeros(2), requires_grad=False)
    return reduced([frozen, nn.Parameter(torch.zeros(2))], groups)


def test_nothing_to_sum_is_nothing_done(ranks: RankPool) -> None:
    assert ranks.run(_nothing_to_sum, 2) == [[None, None]] * 2
