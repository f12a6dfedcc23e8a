"""Every loss among the examples: one process and many ranks agree on losses, logged values, gradients and weights."""

from __future__ import annotations

import pytest
import torch

from tests.examples.outcomes import Case, Outcomes
from tests.examples.rows import ROWS
from tests.support.ranks import RankPool
from tests.support.training import assert_same


@pytest.fixture(scope="session")
def outcomes(ranks: RankPool, request: pytest.FixtureRequest) -> Outcomes:
    parameters = [getattr(item, "callspec", None) for item in request.session.items]
    chosen = [spec.params["case"] for spec in parameters if spec is not None and "case" in spec.params]
    cases = [case for case in chosen if isinstance(case, Case)]
    return Outcomes(ranks, [*cases, *(case.alone for case in cases)])


def cases(*quick: Case, slow: list[Case] | None = None) -> pytest.MarkDecorator:
    """Parametrize a test; the slow ones are near-repeats of the others."""
    marked = [pytest.param(case, id=str(case)) for case in quick]
    marked += [pytest.param(case, id=str(case), marks=pytest.mark.slow) for case in slow or ()]
    return pytest.mark.parametrize("case", marked)


def check(outcomes: Outcomes, case: Case, tolerance: float = 1e-9) -> set[int]:
    """Every rank has what one process has; returns the CP sizes of the packs."""
    expected = outcomes.of(case.alone)[0]
    assert all(torch.tensor(list(expected["logged"].values())).isfinite())
    assert any(bool(gradient.any()) for gradient in expected["gradients"][0].values())
    results = outcomes.of(case)
    assert len(results) == case.world
    for result in results:
        assert_same(result, expected, tolerance)
    return results[0]["cp_sizes"]


TABLE = [Case(name, fmt, world) for world in (4, 2, 6) for name, row in ROWS.items() for fmt in row.formats]
OTHER_WORLDS = [Case("dpo", world=6), Case("value head", world=2)]
QUICK = [case for case in TABLE if case in OTHER_WORLDS or (case.world == 4 and case.fmt in ROWS[case.row].formats[:2])]


@cases(*QUICK, slow=[case for case in TABLE if case not in QUICK])
def test_losses_agree_with_one_process(outcomes: Outcomes, case: Case) -> None:
    sizes = check(outcomes, case)
    assert sizes >= {2: {1, 2}, 4: {1, 2, 4}, 6: {1, 3, 6}}[case.world], "the packs must be of several CP sizes"


TOKEN_WISE = ("token mean", "sum", "value head", "critic", *(name for name in ROWS if name.startswith("distillation")))


def shards(name: str, world: int = 4, fmt: str = "padded") -> Case:
    return Case(name, fmt, world, outputs="auto")


@cases(
    *map(shards, ("token mean", "sum", "critic", "distillation", "grpo, token mean")),
    slow=[
        *(
            shards(name)
            for name in ROWS
            if name not in ("token mean", "sum", "critic", "distillation", "grpo, token mean")
        ),
        *(shards(name, world) for world in (2, 6) for name in ROWS),
        *(shards(name, fmt="packed") for name in TOKEN_WISE),
    ],
)
def test_shards_are_used_for_losses_over_tokens_and_for_no_others(outcomes: Outcomes, case: Case) -> None:
    check(outcomes, case)
    assert {result["sharded"] for result in outcomes.of(case)} == {case.row in TOKEN_WISE}


@cases(
    *(Case(name, precision="32-true") for name in ("token mean", "dpo", "grpo, sample mean, kl")),
    slow=[Case(name, precision="32-true") for name in ("ipo", "value head", "reward model", "distillation")],
)
def test_losses_agree_in_float32(outcomes: Outcomes, case: Case) -> None:
    check(outcomes, case, 1e-5)


@cases(slow=[Case("dpo, Llama", world=2), Case("dpo, Llama", world=4)])
def test_policy_and_reference_of_transformers(outcomes: Outcomes, case: Case) -> None:
    check(outcomes, case)


def bare(name: str) -> Case:
    """60 and 61 tokens fill all four ranks: nothing else is in their packs."""
    return Case(name, without_targets=(0, 9))


@cases(
    *map(bare, ("grpo, token mean", "sample mean", "ipo")),
    slow=[bare(name) for name in ROWS if name not in ("grpo, token mean", "sample mean", "ipo")],
)
def test_a_pack_whose_only_sample_has_no_targets(outcomes: Outcomes, case: Case) -> None:
    check(outcomes, case)


def one_by_one(name: str) -> Case:
    """Batches of a single sample. Where the loss is a mean over samples, the last has one token, so no target."""
    last = (1,) if ROWS[name].normalization == "samples" else ()
    return Case(name, batch_size=1, lengths=(60, 3, 30, 7, *last))


@cases(one_by_one("dpo"), slow=[one_by_one(name) for name in ("token mean", "grpo, sample mean, kl", "critic")])
def test_batches_of_a_single_sample(outcomes: Outcomes, case: Case) -> None:
    check(outcomes, case)
