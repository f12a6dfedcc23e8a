"""Attention over a group is dense attention of each sample alone: every scheme, kind, layout, size and kernel."""

from __future__ import annotations

import random
from itertools import combinations, product
from typing import Any

import numpy as np
import pytest

from tests.attention.covering import covering, pairs_of
from tests.attention.dense import KINDS, Inputs
from tests.attention.support import (
    KERNELS,
    LAYOUTS,
    SCHEMES,
    VIEWS,
    Case,
    Round,
    assert_as_dense,
    attend_on,
    attend_played,
    rounds_off_rank_0,
)
from tests.parallel.support import sample_slices
from tests.support.ranks import RankPool

LENGTHS = (1, 2, 3, 7, 13, 64, 257)


PACKS = {
    1: (257,),
    2: (64, 13),
    5: (2, 64, 1, 257, 7),
    40: (13, 257, *random.Random(0).choices((1, 2, 3, 7, 13), k=37), 64),
}
SIZES = (1, 2, 3, 4, 6, 8)
FACTORS: dict[str, tuple[Any, ...]] = {
    "way": tuple(product(SCHEMES, SIZES)),
    "kind": tuple(KINDS),
    "samples": tuple(PACKS),
    "kv_heads": (1, 2, 4),
    "head_dims": ((6, 6), (6, 3), (5, 8)),
    "layout": LAYOUTS,
    "kernel": ("auto", "reference", "varlen"),
    "source": ("gaussian", "mlp"),
}
"""Scheme and size are one factor, so that each kind, layout, ... meets each scheme at each size."""
FACTORS_ON_RANKS = {"scheme": SCHEMES, "size": (2, 3, 4, 6, 8)} | {n: v for n, v in FACTORS.items() if n != "way"}
"""Fewer rows: processes take longer."""
PLAYED, ON_RANKS = covering(FACTORS, seed=1), covering(FACTORS_ON_RANKS, seed=2)


def case_of(row: dict[str, Any]) -> Case:
    head_dim, v_head_dim = row["head_dims"]
    inputs = Inputs(PACKS[row["samples"]], row["kv_heads"], row["source"], head_dim=head_dim, v_head_dim=v_head_dim)
    scheme, size = row["way"] if "way" in row else (row["scheme"], row["size"])
    return Case(inputs, size, row["layout"], row["kernel"], scheme, KINDS[row["kind"]])


@pytest.mark.parametrize(("design", "factors"), [(PLAYED, FACTORS), (ON_RANKS, FACTORS_ON_RANKS)])
def test_each_value_meets_each_value_of_every_other_factor(
    design: list[dict[str, Any]], factors: dict[str, tuple[Any, ...]]
) -> None:
    met = {pair for row in design for pair in pairs_of(row)}
    for a, b in combinations(factors, 2):
        assert all((a, x, b, y) in met for x, y in product(factors[a], factors[b]))
    assert set().union(*PACKS.values()) == set(LENGTHS)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_each_sample_is_attended_to_as_if_alone(scheme: str, size: int) -> None:
    cases = [case_of(row) for row in PLAYED if row["way"] == (scheme, size)]
    assert len(cases) >= len(KINDS)
    for case in cases:
        assert_as_dense(case, attend_played(case))


@pytest.mark.parametrize(("world", "sizes"), [(8, (2, 4, 8)), (6, (3, 6))])
def test_each_sample_is_attended_to_as_if_alone_on_ranks(ranks: RankPool, world: int, sizes: tuple[int, ...]) -> None:
    cases = [case_of(row) for row in ON_RANKS if row["size"] in sizes]
    checked = 0
    for case, got in attend_on(ranks, world, rounds_off_rank_0(cases, world)):
        assert_as_dense(case, got)
        checked += 1
    assert checked == len(cases) >= 25


@pytest.mark.parametrize(("world", "half"), [(4, 2), (6, 3)])
def test_groups_work_beside_others_and_beside_idle_ranks(ranks: RankPool, world: int, half: int) -> None:
    long, short = Inputs((64, 13, 3)), Inputs((7, 1), kv_heads=1)
    rounds: list[Round] = []
    for scheme, layout in product(SCHEMES, LAYOUTS):
        own, other = (Case(inputs, half, layout, scheme=scheme) for inputs in (long, short))
        rounds += [{half: own}, {0: other, half: own}]
    if world == 6:
        rounds += [{0: Case(long, 3, scheme=scheme), 4: Case(short, 2, scheme=scheme)} for scheme in SCHEMES]
    for case, got in attend_on(ranks, world, rounds):
        assert_as_dense(case, got)


def test_a_hundred_rounds_of_changing_sizes_schemes_and_kinds(ranks: RankPool) -> None:
    packs = [Inputs((13, 7)), Inputs((3, 13), kv_heads=4), Inputs((7, 13, 2), kv_heads=1)]
    draw = random.Random(5)

    def any_case(size: int) -> Case:
        kind, layout = KINDS[draw.choice(list(KINDS))], draw.choice(LAYOUTS)
        return Case(draw.choice(packs), size, layout, scheme=draw.choice(SCHEMES), kind=kind)

    rounds: list[Round] = []
    for _ in range(50):
        rounds += [{0: any_case(2), 2: any_case(2)}, {0: any_case(4)}]
    checked = 0
    for case, got in attend_on(ranks, 4, rounds):
        assert_as_dense(case, got)
        checked += 1
    assert checked == 150


TINY_PACKS = ((1,), (2,), (3,), (1, 2, 3), (1, 1), (3, 1, 1, 2))


def tiny_cases(scheme: str, kernel: str) -> list[Case]:
    """Samples of 1, 2 and 3 tokens on four ranks."""
    kinds = [KINDS[name] for name in ("causal", "bidirectional", "window on both sides", "sinks")]
    ways = product(TINY_PACKS, ("zigzag", "contiguous"), kinds)
    return [Case(Inputs(lengths), 4, layout, kernel, scheme, kind) for lengths, layout, kind in ways]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_samples_shorter_than_the_group_and_ranks_without_tokens(scheme: str, kernel: str) -> None:
    for case in tiny_cases(scheme, kernel):
        assert_as_dense(case, attend_played(case))


def test_samples_shorter_than_the_group_and_ranks_without_tokens_on_ranks(ranks: RankPool) -> None:
    for case, got in attend_on(ranks, 4, [{0: case} for scheme in SCHEMES for case in tiny_cases(scheme, "auto")]):
        assert_as_dense(case, got)


@pytest.mark.parametrize("heads", [(1, 1), (3, 3), (6, 2), (12, 4), (10, 5)], ids=str)
@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_heads_that_the_ranks_cannot_share_evenly(scheme: str, size: int, heads: tuple[int, int]) -> None:
    inputs = Inputs((13, 7, 2), heads[1], heads=heads[0])
    case = Case(inputs, size, scheme=scheme, kind=KINDS["everything at once"])
    assert_as_dense(case, attend_played(case))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_views_give_the_same_as_contiguous_tensors(scheme: str, size: int, kernel: str) -> None:
    plain, *views = (
        attend_played(Case(Inputs((13, 64, 7)), size, kernel=kernel, scheme=scheme, view=view)).arrays for view in VIEWS
    )
    for arrays in views:
        for name, array in plain.items():
            np.testing.assert_allclose(arrays[name], array, rtol=0, atol=1e-13)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_last_token_of_each_sample_gets_its_gradients(scheme: str, size: int) -> None:
    inputs = Inputs((7, 5, 1, 13))
    got = attend_played(Case(inputs, size, scheme=scheme))
    for where in sample_slices(inputs.lengths):
        last = where.stop - 1
        assert np.abs(got.arrays["dv"][last]).min() > 0
        if where.stop - where.start > 1:  # with one key alone its score does not matter
            assert np.abs(got.arrays["dk"][last]).min() > 0


@pytest.mark.parametrize("name", sorted(KINDS.keys() - {"causal"}))
def test_the_comparison_tells_kinds_apart(name: str) -> None:
    case = Case(Inputs((13, 120)), 2, kind=KINDS[name])
    got = attend_played(case)
    assert_as_dense(case, got)
    got.arrays.pop("dsinks", None)
    with pytest.raises(AssertionError, match="is off"):
        assert_as_dense(Case(Inputs((13, 120)), 2), got)
