"""Which steps are measured."""

import pytest

from lightning_dcp.calibration.grid import (
    GridPoint,
    PlannedSteps,
    by_lengths,
    default_lengths,
    grid,
    length_problems,
)


@pytest.mark.parametrize(("ranks", "limit"), [(1, 64), (2, 128), (3, 100), (4, 1024), (6, 50), (8, 8192)])
def test_the_default_grid_covers_every_size_up_to_its_limit(ranks, limit):
    points = by_lengths(grid(default_lengths(ranks, limit), ranks, limit), ranks, limit, "zigzag")
    sizes = {c for c in range(1, ranks + 1) if ranks % c == 0}
    assert {point.cp_size for point, _ in points.values()} == sizes
    for cp_size in sizes:
        own = [point for point, _ in points.values() if point.cp_size == cp_size]
        assert max(sum(point.samples) for point in own) == cp_size * limit
        assert {len(point.samples) for point in own} >= {1}
        assert any(point.packs == 2 for point in own)
    assert next(iter(points.values()))[0].cp_size == 1


@pytest.mark.parametrize("ranks", [1, 2, 4, 6])
def test_every_rank_runs_the_same_packs(ranks):
    points = by_lengths(grid(default_lengths(ranks, 256), ranks, 256), ranks, 256, "contiguous")
    for lengths, (point, plan) in points.items():
        assert plan.lengths == lengths
        for rank in range(ranks):
            packs = plan.packs_of(rank)
            assert len(packs) == point.packs
            for pack in packs:
                assert (pack.cp_size, pack.layout) == (point.cp_size, "contiguous")
                assert tuple(lengths[s] for s in pack.samples) == point.samples


def test_short_samples_and_long_ones_of_as_many_tokens_are_both_there():
    points = grid([512], 2, 512)
    assert {point.samples for point in points if point.cp_size == 1} == {(512,), (128,) * 4, (32,) * 16}


def test_batches_that_would_look_alike_get_a_token_less():
    points = [GridPoint(1, (8, 8)), GridPoint(1, (8,), packs=2), GridPoint(2, (8,) * 4)]
    found = by_lengths(points, 2, 16, "zigzag")
    assert list(found) == [(8, 8, 8, 8), (7, 7, 7, 7), (6, 6, 6, 6)]
    scheduler = PlannedSteps({lengths: plan for lengths, (_, plan) in found.items()})
    assert [pack.cp_size for pack in scheduler.schedule([6, 6, 6, 6]).packs()] == [2]


def test_lengths_that_fit_are_accepted():
    assert length_problems([64, 128], 2, 64) == []


@pytest.mark.parametrize(
    ("lengths", "found"),
    [
        ([0, 5], "not positive whole numbers"),
        ([True, 5], "not positive whole numbers"),
        ([64, 300], "holds 256 tokens"),
        ([64], "1 different length"),
        ([64, 64], "1 different length"),
        ([200, 240], "none fits on one rank"),
    ],
)
def test_lengths_that_cannot_be_measured_are_named(lengths, found):
    problems = length_problems(lengths, 2, 128)
    assert len(problems) == 1
    assert found in problems[0].found


def test_all_problems_are_told_at_once():
    assert len(length_problems([0, 999], 2, 128)) == 2
