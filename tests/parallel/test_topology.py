"""Sizes of the parallel dimensions."""

from __future__ import annotations

import pytest

from lightning_dcp.parallel.topology import Topology


@pytest.mark.parametrize(
    ("world", "tensor", "sizes"),
    [(1, 1, [1]), (6, 1, [1, 2, 3, 6]), (8, 1, [1, 2, 4, 8]), (8, 2, [1, 2, 4]), (6, 2, [1, 3]), (12, 2, [1, 2, 3, 6])],
)
def test_the_sizes_offered_are_the_divisors_of_the_plane(world: int, tensor: int, sizes: list[int]) -> None:
    topology = Topology(world, tensor_model_parallel_size=tensor)
    assert topology.cp_sizes == sizes
    assert topology.plane_size == sizes[-1]
    assert topology.problems() == []


def test_a_world_that_the_model_parallel_sizes_do_not_divide() -> None:
    (problem,) = Topology(6, tensor_model_parallel_size=2, pipeline_model_parallel_size=2).problems()
    assert "a world of 6 ranks, which 4 does not divide" in str(problem)
    assert "multiple of 4" in problem.remedy


def test_a_static_size_that_does_not_divide_the_plane_is_told_with_those_that_do() -> None:
    (problem,) = Topology(6, context_parallel_size=4).problems()
    assert problem.asked == "context_parallel_size=4"
    assert "plane of 6 rank(s)" in problem.found
    assert "[1, 2, 3, 6]" in problem.remedy and "multiple of 4" in problem.remedy


def test_a_static_size_larger_than_the_world() -> None:
    (problem,) = Topology(2, context_parallel_size=4).problems()
    assert "plane of 2 rank(s)" in problem.found
