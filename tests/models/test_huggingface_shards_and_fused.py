"""Hugging Face models with sharded outputs, with the fused loss, and with both."""

from __future__ import annotations

from typing import Any

import pytest

from tests.models.families import FAMILIES
from tests.models.runs import Arm, assert_arm, on_ranks, train_arms, users_loss
from tests.support.ranks import RankPool

ARMS = {name: Arm(name) for name in FAMILIES} | {"logits": Arm("llama", users_loss)}


@pytest.fixture(scope="module")
def one_process(ranks: RankPool) -> dict[str, Any]:
    return ranks.run(train_arms, 1, ARMS, strategy=None)[0]


WAYS = {
    "fused": {"fused_linear_cross_entropy": True},
    "sharded": {"outputs": "sharded"},
    "fused and sharded": {"fused_linear_cross_entropy": True, "outputs": "sharded"},
}


@pytest.mark.parametrize("world", [4, pytest.param(2, marks=pytest.mark.slow), pytest.param(6, marks=pytest.mark.slow)])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
@pytest.mark.parametrize("fmt", ["padded", pytest.param("packed", marks=pytest.mark.slow)])
def test_the_same_as_one_process(
    ranks: RankPool, one_process: dict[str, Any], world: int, way: dict[str, Any], fmt: str
) -> None:
    results = ranks.run(train_arms, world, ARMS, strategy=on_ranks(world, **way), fmt=fmt, timeout=180)
    for name in ARMS:
        assert_arm(name, results, one_process)
