"""Planted costs of kinds are found again; what cannot be learned from is refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from lightning_dcp.calibration.densities import MOST_KINDS, OTHERS, fit_densities, learn_densities
from lightning_dcp.cli import main
from lightning_dcp.errors import DataError
from lightning_dcp.stability.record import PackTime, RankTime, StepRecord
from lightning_dcp.stability.run_folder import RunFolder

COSTS = {"text": 1.1e-5, "assistant": 1.0e-5, "tool": 2.4e-5, "tool_call": 1.5e-5}
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
    assert found == pytest.approx({kind: cost / 1.0e-5 for kind, cost in COSTS.items()}, rel=0.05)


def test_without_noise_they_are_exact() -> None:
    fit = fit_densities(run(COSTS, noise=0.0))
    assert fit.densities == pytest.approx({kind: cost / 1.0e-5 for kind, cost in COSTS.items()}, rel=1e-9)
    assert (fit.rows, fit.left_out) == (240, 0)
    assert {cost.kind: cost.seconds for cost in fit.kinds} == pytest.approx(COSTS, rel=1e-9)


def test_a_rare_cheap_kind_does_not_set_the_unit_and_one_without_cost_gets_no_density() -> None:
    records = run({"text": 2e-5, "tool": 4e-5}, noise=0.0)
    rare = [
        _with_rare(record, random) for record, random in zip(records, np.random.default_rng(1).spawn(60), strict=True)
    ]
    fit = fit_densities(rare)
    assert fit.densities == pytest.approx({"text": 1.0, "tool": 2.0, "cheap": 0.5}, rel=1e-6)
    assert next(cost for cost in fit.kinds if cost.kind == "free").density is None


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
    assert len(fit.densities) == MOST_KINDS - 1
    assert OTHERS not in fit.densities
    for kind, density in fit.densities.items():
        least = min(costs[k] for k in fit.densities)
        assert density == pytest.approx(costs[kind] / least, rel=0.05)


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
    assert yaml.safe_load(text) == pytest.approx({k: cost / 1.0e-5 for k, cost in COSTS.items()}, rel=0.05)
    assert text.startswith("# Densities of segments by kind, learned by `lightning-dcp densities` from ")
    printed = capsys.readouterr().out
    for words in ("tool_call", "microseconds a token", "ChatDataModule(densities="):
        assert words in printed


@pytest.mark.parametrize(
    ("words", "message"),
    [(["{0}"], "holds no record of a run"), (["{0}", "--output={0}/none/file.yaml"], "no folder")],
)
def test_mistakes_end_with_a_message(tmp_path: Path, words: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        main(["densities", *(word.format(tmp_path) for word in words)])
