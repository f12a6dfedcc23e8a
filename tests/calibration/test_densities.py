"""Planted costs of kinds are found again; what cannot be learned from is refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from lightning_dcp.calibration.densities import MOST_KINDS, fit_densities, learn_densities
from lightning_dcp.cli import main
from lightning_dcp.data.chat.densities import densities_of
from lightning_dcp.errors import DataError
from lightning_dcp.stability.record import PackTime, RankTime, StepRecord
from lightning_dcp.stability.run_folder import RunFolder

COSTS = {"text": 1.1e-5, "assistant": 1.0e-5, "tool": 2.4e-5, "tool_call": 1.5e-5}
DENSITIES = {kind: cost / COSTS["text"] for kind, cost in COSTS.items()}
OVERHEAD_S = 0.004


def run(
    costs: Mapping[str, float], *, steps: int = 60, noise: float = 0.03, outliers: float = 0.0, seed: int = 0
) -> list[StepRecord]:
    """Steps of four ranks with one to three packs each, whose ranks compute for as long as their tokens cost."""
    random = np.random.default_rng(seed)
    return [_step(number, costs, random, noise, outliers) for number in range(steps)]


def _step(number: int, costs: Mapping[str, float], random: Any, noise: float, outliers: float) -> StepRecord:
    packs, ranks = [], []
    for rank in range(4):
        own = [
            {kind: int(count) for kind, count in zip(costs, random.integers(0, 900, len(costs)), strict=True)}
            for _ in range(random.integers(1, 4))
        ]
        busy = len(own) * OVERHEAD_S + sum(costs[kind] * count for pack in own for kind, count in pack.items())
        busy *= float(random.lognormal(0.0, noise)) * (5.0 if random.random() < outliers else 1.0)
        ranks.append(RankTime(rank, busy, 0.1, 0.0, 0.1))
        for i, kinds in enumerate(own):
            named = {kind: count for kind, count in kinds.items() if kind != "text"}  # no segment names plain text
            packs.append(PackTime(i, rank, rank, 1, 0.0, 0.1, sum(kinds.values()), tokens_by_kind=named))
    return StepRecord(number, 1.0, sum(p.tokens for p in packs), None, tuple(ranks), (), tuple(packs))


@pytest.mark.parametrize("outliers", [0.0, 0.05])
def test_planted_densities_are_found_within_five_percent(outliers: float) -> None:
    """Three percent of noise on each rank's step; and one in twenty five times as slow for no reason of its tokens."""
    found = learn_densities(run(COSTS, steps=400, outliers=outliers))
    assert found == pytest.approx(DENSITIES, rel=0.05)


def test_without_noise_they_are_exact() -> None:
    fit = fit_densities(run(COSTS, noise=0.0))
    assert fit.densities == pytest.approx(DENSITIES, rel=1e-9)
    assert fit.warnings == fit.not_told == ()
    assert (fit.rows, fit.left_out) == (240, 0)
    assert {cost.kind: cost.seconds for cost in fit.kinds} == pytest.approx(COSTS, rel=1e-9)


@pytest.mark.parametrize(
    ("costs", "base", "unit"),
    [
        ({"user": 2e-5, "tool": 3e-5, "system": 1e-5}, "the cost of user", 2e-5),
        ({"tool": 3e-5, "system": 1e-5, "code": 1.5e-5}, "the median cost of a token of common kinds", 1.5e-5),
    ],
)
def test_what_density_one_is(costs: dict[str, float], base: str, unit: float) -> None:
    """Not the cheapest kind: with it as the unit all others would be called dense."""
    fit = fit_densities(run(costs, noise=0.0))
    assert fit.base == base
    assert fit.densities == pytest.approx({kind: cost / unit for kind, cost in costs.items()}, rel=1e-9)


def test_a_cost_that_moves_from_block_to_block_could_not_be_told() -> None:
    """Ten tokens a pack at most, beside ranks' steps that are off by a third: whatever was fitted to them is noise."""
    records = run({"text": 2e-5, "tool": 4e-5}, noise=0.3)
    fit = fit_densities(
        [_with_rare(r, random) for r, random in zip(records, np.random.default_rng(1).spawn(60), strict=True)]
    )
    assert set(fit.not_told) == {"cheap", "free"}
    assert fit.densities == {"text": 1.0, "tool": pytest.approx(2.0, rel=0.15), "cheap": 1.0, "free": 1.0}


def test_few_rows_and_many_left_out_are_warned_of() -> None:
    few = fit_densities(run(COSTS, steps=30)).warnings
    assert len(few) == 1
    assert "with fewer than 200" in few[0]
    many = fit_densities(run(COSTS, steps=300, outliers=0.2)).warnings
    assert len(many) == 1
    assert "were left out as far off" in many[0]


def test_a_rare_cheap_kind_does_not_set_the_unit_and_one_without_cost_is_written_as_one() -> None:
    records = run({"text": 2e-5, "tool": 4e-5}, noise=0.0)
    rare = [
        _with_rare(record, random) for record, random in zip(records, np.random.default_rng(1).spawn(60), strict=True)
    ]
    fit = fit_densities(rare)
    assert fit.densities == pytest.approx({"text": 1.0, "tool": 2.0, "cheap": 0.5, "free": 1.0}, rel=1e-6)
    assert next(cost for cost in fit.kinds if cost.kind == "free").density is None
    assert fit.not_told == ("free",)


def _with_rare(record: StepRecord, random: Any) -> StepRecord:
    """Up to ten tokens a pack each of a kind that costs half of text, and of one that costs nothing."""
    packs, ranks = [], []
    for time in record.ranks:
        own = [pack for pack in record.packs if pack.rank == time.rank]
        more = [(int(random.integers(0, 11)), int(random.integers(0, 11))) for _ in own]
        busy = time.busy_s + 1e-5 * sum(cheap for cheap, _ in more)
        ranks.append(RankTime(time.rank, busy, 0.1, 0.0, 0.1))
        for pack, (cheap, free) in zip(own, more, strict=True):
            kinds = pack.tokens_by_kind | {"cheap": cheap, "free": free}
            packs.append(PackTime(0, time.rank, 0, 1, 0.0, 0.1, pack.tokens + cheap + free, tokens_by_kind=kinds))
    return StepRecord(record.step, 1.0, 0, None, tuple(ranks), (), tuple(packs))


def test_the_rarest_of_many_kinds_are_measured_as_one() -> None:
    costs = {f"kind {i}": 1e-5 * (1 + i / 10) for i in range(MOST_KINDS + 3)}
    fit = fit_densities(run(costs, steps=200, noise=0.01))
    assert len(fit.kinds) == MOST_KINDS
    assert fit.densities.keys() == costs.keys()
    assert len(fit.rare) == 4
    assert fit.not_told == fit.rare
    unit = next(kind for kind, density in fit.densities.items() if density == 1.0 and kind not in fit.rare)
    for kind, density in fit.densities.items():
        assert density == (1.0 if kind in fit.rare else pytest.approx(costs[kind] / costs[unit], rel=0.05))


def same_shares(records: list[StepRecord]) -> list[StepRecord]:
    packs = (PackTime(0, 0, 0, 1, 0.0, 0.1, 100, tokens_by_kind={"user": 40, "tool": 60}),)
    return [StepRecord(n, 1.0, 100, None, (RankTime(0, 0.1 + n / 100, 0, 0, 0),), (), packs) for n in range(40)]


def no_growth(records: list[StepRecord]) -> list[StepRecord]:
    return [
        StepRecord(n, 1.0, 0, None, (RankTime(0, 0.1, 0, 0, 0),), (), (PackTime(0, 0, 0, 1, 0.0, 0.1, 100 - n),))
        for n in range(40)
    ]


@pytest.mark.parametrize(
    ("records", "message"),
    [
        (lambda records: [], "no step of the record says which packs ranks had"),
        (lambda records: [StepRecord(0, 1.0, 9, None, records[0].ranks)], "no step of the record says"),
        (lambda records: records[:4], r"16 steps of ranks are too few for 4 kind\(s\): record 20 or more"),
        (same_shares, "the kinds tool, user cannot be told apart"),
        (no_growth, "do not grow with the tokens"),
    ],
)
def test_what_cannot_be_learned_from_is_refused(records: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        learn_densities(records(run(COSTS)))


def test_the_command_writes_a_file_of_densities(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = RunFolder(tmp_path / "run" / "stability", {"warmup_batches": 2})
    for record in run(COSTS, steps=400):
        folder.add(record)
    folder.flush()
    output = tmp_path / "densities.yaml"
    main(["densities", str(tmp_path / "run"), f"--output={output}"])
    text = output.read_text()
    assert yaml.safe_load(text) == pytest.approx(DENSITIES, rel=0.05)
    assert text.startswith("# Densities of segments by kind, learned by `lightning-dcp densities` from ")
    printed = capsys.readouterr().out
    for words in (
        "microseconds a token",
        "Density 1 is the cost of text. Dense (1.5 or more): tool.",
        "ChatDataModule(densities=",
    ):
        assert words in printed


def test_what_could_not_be_told_is_in_the_file_with_a_comment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder(tmp_path / "stability", {})
    records = run({"text": 2e-5, "tool": 4e-5}, steps=40)
    for record, random in zip(records, np.random.default_rng(1).spawn(40), strict=True):
        folder.add(_with_rare(record, random))
    folder.flush()
    output = tmp_path / "densities.yaml"
    main(["densities", str(tmp_path), f"--output={output}"])
    text = output.read_text()
    assert "# could not be told, so 1.0:\nfree: 1.0\n" in text
    assert "# Warning: only " in text
    assert densities_of(str(output))["tool"] == pytest.approx(2.0, rel=0.05)
    printed = capsys.readouterr().out
    assert "Could not be told, written as 1.0:" in printed
    assert "Warning: only " in printed


@pytest.mark.parametrize(
    ("words", "message"),
    [(["{0}"], "holds no record of a run"), (["{0}", "--output={0}/none/file.yaml"], "no folder")],
)
def test_mistakes_end_with_a_message(tmp_path: Path, words: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        main(["densities", *(word.format(tmp_path) for word in words)])
