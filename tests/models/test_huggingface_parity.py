"""Every family of Hugging Face models: training over CP groups against plain Lightning in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.models.families import FAMILIES, MORE, TRANSFORMERS_5, WITHOUT_INTERFACE, lacking
from tests.models.runs import LIMIT, Arm, assert_arm, on_ranks, once, train_arms, users_loss
from tests.support.ranks import RankPool

Run = Callable[..., list[dict[str, Any]]]
HERE = [name for name in FAMILIES if name not in lacking(FAMILIES)]
OTHERS = [name for name in MORE if name not in lacking(MORE) and not (TRANSFORMERS_5 and name in WITHOUT_INTERFACE)]

ARMS = {name: Arm(name) for name in HERE} | {
    f"{name}, own loss": Arm(name, users_loss) for name in ("llama", "gpt-oss")
}


@pytest.fixture(scope="module")
def trained(ranks: RankPool) -> Run:
    """Runs of all families at once, each made once; world 0 is plain Lightning on one process and padded batches."""

    @once
    def run(world: int, fmt: str, precision: str = "64-true", fused: bool = False) -> list[dict[str, Any]]:
        options: dict[str, Any] = {"precision": precision, "exact": precision == "64-true"}
        if precision != "64-true":
            options["lr"] = 0.1  # a step of lr 1 makes weights that are large for their precision
        if not world:
            return ranks.run(train_arms, 1, ARMS, strategy=None, timeout=300, **options)
        strategy = on_ranks(world, fused_linear_cross_entropy=fused)
        return ranks.run(train_arms, world, ARMS, strategy=strategy, fmt=fmt, timeout=300, **options)

    return run


SLOW = pytest.mark.slow
RUNS = [(4, "padded"), pytest.param(4, "packed", marks=SLOW), pytest.param(2, "packed", marks=SLOW)]
RUNS += [
    pytest.param(1, "padded", marks=SLOW),
    pytest.param(6, "padded", marks=SLOW),
    pytest.param(2, "jagged", marks=SLOW),
]


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize(("world", "fmt"), RUNS)
def test_training_is_that_of_one_process(trained: Run, world: int, fmt: str, arm: str) -> None:
    assert_arm(arm, trained(world, fmt), trained(0, "padded")[0])


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize(("world", "fmt"), [(2, "packed"), pytest.param(4, "padded", marks=SLOW)])
def test_loss_without_logits(trained: Run, world: int, fmt: str, arm: str) -> None:
    assert_arm(arm, trained(world, fmt, fused=True), trained(0, "padded")[0])


@pytest.mark.slow
@pytest.mark.parametrize("arm", ARMS)
def test_float32(trained: Run, arm: str) -> None:
    assert_arm(arm, trained(4, "packed", "32-true"), trained(0, "padded", "32-true")[0], 1e-5)


@pytest.mark.parametrize("world", [4, pytest.param(6, marks=SLOW)])
def test_batches_use_several_cp_sizes(trained: Run, world: int) -> None:
    for sizes in trained(world, "padded")[0]["cp_sizes"]:
        assert len(set(sizes)) > 1, sizes


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_families_beside_those_promised(ranks: RankPool, world: int) -> None:
    """The longest sample needs all ranks, the shortest one, so that a family is seen at several sizes."""
    arms = {name: Arm(name) for name in OTHERS}
    expected = ranks.run(train_arms, 1, arms, strategy=None, timeout=300)[0]
    ours = ranks.run(train_arms, world, arms, strategy=on_ranks(world), timeout=300)
    for name in arms:
        assert_arm(name, ours, expected)


def test_every_family_is_here() -> None:
    """Of what is promised, an older transformers may lack something; the newer one lacks nothing."""
    assert set(LIMIT) == {1, 2, 4, 6}
    assert lacking(FAMILIES) == []
