"""The pace of ranks: work is unequal on purpose, and the cost model is wrong."""

from __future__ import annotations

import random
from statistics import median

import pytest

from lightning_dcp.stability.pace import Work, paces
from tests.stability.records import uneven

TRUE = (30.0, 0.7, 4.0)
"""What each kind of work takes, in seconds of the cost model: nothing like what it believes."""


def history(slow: dict[int, float], *, noise: float = 0.1, ranks: int = 4, steps: int = 12) -> dict[int, list[Work]]:
    draw = random.Random(7)
    works: dict[int, list[Work]] = {rank: [] for rank in range(ranks)}
    for step in range(steps):
        for rank, parts in enumerate(uneven(step, ranks)):
            seconds = sum(f * p for f, p in zip(TRUE, parts, strict=True)) * (1 + noise * draw.random())
            works[rank].append(Work(step, slow.get(rank, 1.0) * seconds, parts))
    return works


@pytest.mark.parametrize("ranks", [2, 3, 4, 16])
@pytest.mark.parametrize("factor", [1.5, 3.0])
def test_a_slow_rank_is_told_by_its_factor_whatever_the_cost_model_believes(ranks: int, factor: float) -> None:
    found = paces(history({1: factor}, ranks=ranks))
    assert median(pace.ratio for pace in found[1]) == pytest.approx(factor, rel=0.1)
    assert all(median(p.ratio for p in own) < 1.25 for rank, own in found.items() if rank != 1)


def test_by_the_cost_models_own_weights_alone_sound_ranks_would_seem_slow() -> None:
    works = history({}, noise=0.0)
    naive = [work.busy_s / sum(work.parts) for own in works.values() for work in own]
    assert max(naive) > 3 * min(naive)
    found = paces(works, range(4))
    assert len(found) == 4
    for own in found.values():
        assert all(pace.ratio == pytest.approx(1.0, abs=1e-6) for pace in own)


def test_two_slow_ranks_of_eight_are_both_told() -> None:
    found = paces(history({2: 2.0, 5: 1.7}, ranks=8))
    assert median(p.ratio for p in found[2]) == pytest.approx(2.0, rel=0.15)
    assert median(p.ratio for p in found[5]) == pytest.approx(1.7, rel=0.15)


def test_kinds_of_work_that_always_go_together_are_no_obstacle() -> None:
    works = {
        r: [Work(s, (s + 1) * (2.0 if r == 0 else 1.0), ((s + 1) / 10, (s + 1) / 5, 0.0)) for s in range(9)]
        for r in range(4)
    }
    assert median(p.ratio for p in paces(works)[0]) == pytest.approx(2.0)


@pytest.mark.parametrize(
    "works", [{}, {0: []}, {0: [Work(0, 1.0, (1.0,))]}, {0: [Work(0, 1.0, (1.0,))], 1: [Work(0, 1.0, (0.0,))]}]
)
def test_nothing_is_said_of_a_rank_without_others(works: dict[int, list[Work]]) -> None:
    assert paces(works) == {}


def test_a_watched_rank_is_told_also_when_it_is_the_fastest() -> None:
    works = history({3: 0.5})
    assert 3 not in paces(works)
    assert median(p.ratio for p in paces(works, [3])[3]) == pytest.approx(0.5, rel=0.1)


def dense_on_one(slow: dict[int, float], cost: float) -> dict[int, list[Work]]:
    """Rank 2 holds all dense tokens, which cost so many times what their density says."""
    works = history(slow, noise=0.05)
    draw = random.Random(3)
    found: dict[int, list[Work]] = {rank: [] for rank in works}
    for rank, own in works.items():
        for work in own:
            extra = draw.uniform(0.5, 2) * 0.02 if rank == 2 else 0.0
            seconds = work.busy_s + slow.get(rank, 1.0) * cost * TRUE[1] * extra
            found[rank].append(Work(work.step, seconds, (*work.parts, extra)))
    return found


def test_a_rank_that_holds_all_dense_tokens_is_not_slow_for_that() -> None:
    assert all(median(p.ratio for p in own) < 1.25 for own in paces(dense_on_one({}, 1.0), range(4)).values())
    slow = paces(dense_on_one({2: 2.0}, 1.0), range(4))
    assert median(p.ratio for p in slow[2]) == pytest.approx(2.0, rel=0.15)


def test_what_dense_tokens_cost_is_learnt_from_others_that_hold_some() -> None:
    """Six times what their densities say, and nothing."""
    for cost in (6.0, 0.0):
        works = {
            rank: [
                Work(
                    w.step,
                    w.busy_s + cost * TRUE[1] * 0.01 * (w.step * (rank + 2) % 5),
                    (*w.parts, 0.01 * (w.step * (rank + 2) % 5)),
                )
                for w in own
            ]
            for rank, own in history({}, noise=0.0).items()
        }
        for own in paces(works, range(4)).values():
            assert median(p.ratio for p in own) == pytest.approx(1.0, abs=0.1)


def test_dense_tokens_count_also_where_tokens_and_attention_always_go_together() -> None:
    works = {
        rank: [
            Work(s, 3 * (0.01 * (s + 1) + extra), (0.0, 0.004 * (s + 1), 0.006 * (s + 1), extra))
            for s in range(9)
            for extra in [0.05 * (rank == 1)]
        ]
        for rank in range(4)
    }
    assert median(p.ratio for p in paces(works, [1])[1]) < 1.25


def test_a_slow_rank_makes_no_other_look_slow() -> None:
    """As with contiguous chunks: the slow rank has most of the attention always."""
    works = {
        rank: [
            Work(s, (1.8 if rank == 3 else 1.0) * (linear + attention), (0.0, linear, attention, 0.0))
            for s in range(9)
            for linear, attention in [(0.1 * (5 + s), 0.002 * (5 + s) ** 2 * (2 * rank + 1))]
        ]
        for rank in range(4)
    }
    found = {rank: median(p.ratio for p in own) for rank, own in paces(works, range(4)).items()}
    assert found[3] == pytest.approx(1.8)
    assert max(found[rank] for rank in range(3)) < 1.05
