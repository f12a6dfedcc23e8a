"""Whatever the order in which a ring visits its ranks, attention and its gradients are those of dense attention."""

from __future__ import annotations

from itertools import permutations, product

import numpy as np
import pytest

from tests.attention.dense import KINDS, Inputs
from tests.attention.support import LAYOUTS, Case, assert_as_dense, attend_on, attend_played, rounds_off_rank_0
from tests.support.ranks import RankPool

UNEQUAL = Inputs((13, 1, 7, 2))
SHORT = Inputs((1, 2), kv_heads=1)  # on four ranks some have nothing


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_order_gives_dense_attention(size: int, layout: str) -> None:
    for ring in permutations(range(size)):
        for inputs in (UNEQUAL, SHORT):
            case = Case(inputs, size, layout, ring=ring)
            assert_as_dense(case, attend_played(case))


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_attention_in_an_order_that_is_no_rotation_of_the_ranks(kind: str) -> None:
    for layout in LAYOUTS:
        case = Case(UNEQUAL, 4, layout, ring=(0, 2, 1, 3), kind=KINDS[kind])
        assert_as_dense(case, attend_played(case))


def test_all_orders_give_what_the_order_of_ranks_gives() -> None:
    by_rank = attend_played(Case(UNEQUAL, 4)).arrays
    for ring in permutations(range(4)):
        got = attend_played(Case(UNEQUAL, 4, ring=ring)).arrays
        assert all(np.abs(got[name] - by_rank[name]).max() <= 1e-10 for name in by_rank)


@pytest.mark.parametrize(
    ("world", "rings"),
    [
        (4, [(1, 0), (0, 2, 1, 3), (0, 3, 2, 1), (2, 0, 3, 1)]),
        (6, [(0, 2, 1), (2, 1, 0), (0, 3, 1, 4, 2, 5)]),
    ],
)
def test_orders_on_ranks_give_dense_attention(ranks: RankPool, world: int, rings: list[tuple[int, ...]]) -> None:
    ways = product(rings, ("zigzag", "contiguous", "random"), (UNEQUAL, SHORT))
    cases = [Case(inputs, len(ring), layout, ring=ring) for ring, layout, inputs in ways]
    checked = 0
    for case, got in attend_on(ranks, world, rounds_off_rank_0(cases, world)):
        assert_as_dense(case, got)
        checked += 1
    assert checked == len(cases)


def test_groups_of_other_orders_work_beside_each_other(ranks: RankPool) -> None:
    rounds = [
        {0: Case(UNEQUAL, 2, ring=(1, 0)), 2: Case(SHORT, 2)},
        {0: Case(UNEQUAL, 4, "random", ring=(0, 2, 3, 1))},
        {0: Case(SHORT, 4, ring=(3, 1, 2, 0), kind=KINDS["bidirectional"])},
    ]
    for case, got in attend_on(ranks, 4, rounds * 3):
        assert_as_dense(case, got)
