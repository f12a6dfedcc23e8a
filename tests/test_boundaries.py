"""Shards under budgets and rings in any order, through a trainer: losses, gradients and weights are those of one process."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_dcp import BoundaryBudget, ConfigurationError, DCPStrategy
from lightning_dcp.errors import BoundaryError
from lightning_dcp.parallel.layout import zigzag
from lightning_dcp.segments import Segment
from lightning_dcp.strategy.steadiness import SteadinessChoice
from tests.support import training
from tests.support.ranks import RankPool
from tests.support.training import RaggedTokens, TinyModule, assert_same, trainer

LENGTHS = (60, 3, 30, 7, 1, 12, 5, 29, 2, 61, 16, 9)
BUDGET = {"max_tokens": 16, "dense_limit": 9}


def turns(length: int) -> tuple[Segment, ...]:
    """A sample in turns of up to 7 tokens, each third of them dense; a few tokens at the end belong to none."""
    borders = [*range(0, length - length // 9, 7), length - length // 9]
    spans = itertools.pairwise(borders)
    return tuple(
        Segment(a, b, "tool" if n % 3 == 1 else "user", 2.0 if n % 3 == 1 else 1.0)
        for n, (a, b) in enumerate(spans)
        if a < b
    )


class Turns(RaggedTokens):
    """Random tokens that have segments."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = super().__getitem__(index)
        return sample | {"segments": turns(len(sample["input_ids"]))}


class Layouts(training.Recorder):
    """Keeps the layouts, audits and rings of all packs, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layouts: list[Any] = []
        self.levels: list[str] = []
        self.rings: list[tuple[int, ...]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *rest: Any) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, *rest)
        scheduled = trainer.strategy.callback.scheduled
        settled = scheduled.planned.settled
        self.layouts += settled.layouts
        self.levels.append("none" if settled.audit is None else settled.audit.level)
        self.rings += [work.active.context.ring for work in scheduled.works()]


def fit(strategy: dict[str, Any] | None, fmt: str = "packed", **options: Any) -> dict[str, Any]:
    recorder, model = Layouts() if strategy else training.Recorder(), TinyModule()
    run = trainer(strategy=strategy, callbacks=[recorder], **options)
    data = torch.utils.data.DataLoader(Turns(LENGTHS), batch_size=6, collate_fn=training.COLLATORS[fmt])
    run.fit(model, data)
    found = {
        "losses": recorder.losses,
        "gradients": recorder.gradients,
        "weights": {name: p.detach().clone() for name, p in model.named_parameters()},
        "logged": {name: float(value) for name, value in run.callback_metrics.items()},
    }
    if strategy:
        found |= {"layouts": recorder.layouts, "levels": recorder.levels, "rings": recorder.rings}
    return found


@pytest.fixture(scope="module")
def one_process(ranks: RankPool) -> Any:
    """Plain Lightning on one process and padded batches."""
    return ranks.run(fit, 1, None, "padded")[0]


@pytest.mark.parametrize(
    ("world", "fmt", "options"),
    [
        (4, "packed", {"attention": "ring", "ring_order": [0, 2, 1, 3]}),
        (4, "padded", {"attention": "all_gather", "ring_order": "measured"}),
        (4, "jagged", {"attention": "ring", "ring_order": [3, 1, 0, 2]}),
        (2, "packed", {"attention": "ulysses", "max_seqlen_per_dp_cp_rank": 40}),
    ],
)
def test_budgeted_shards_give_what_one_process_gives(
    ranks: RankPool, one_process: Any, world: int, fmt: str, options: dict[str, Any]
) -> None:
    budget = BoundaryBudget(**BUDGET | ({"max_tokens": 40} if world == 2 else {}))
    strategy = {"max_seqlen_per_dp_cp_rank": 16, "layout": "budgeted", "boundary_budget": budget} | options
    for result in ranks.run(fit, world, strategy, fmt):
        assert_same(result, one_process, 1e-10)
        cut = [layout for layout in result["layouts"] if layout.size > 1]
        assert cut, "samples are cut"
        assert any(layout != zigzag(layout.lengths, layout.size) for layout in cut), (
            "at other places than zigzag cuts them"
        )
        for layout in cut:
            assert max(layout.tokens(rank) for rank in range(layout.size)) <= budget.max_tokens
    order = options.get("ring_order")
    if isinstance(order, list):
        rings = [ring for ring in result["rings"] if len(ring) == 4]
        start = order.index(0)
        assert rings and set(rings) == {tuple(order[start:] + order[:start])}


def failing(strategy: dict[str, Any]) -> str:
    try:
        fit(strategy)
    except BoundaryError as error:
        return str(error)
    return ""


def test_broken_budgets_are_warned_of_replanned_or_refused(ranks: RankPool) -> None:
    """Zigzag cuts dense turns and puts more dense tokens on a rank than these budgets allow."""
    tight = {"max_seqlen_per_dp_cp_rank": 16, "boundary_budget": BoundaryBudget(dense_limit=6)}
    warned = ranks.run(fit, 4, tight)[0]
    assert "refuse" in warned["levels"]
    assert warned["layouts"] == [], "zigzag is audited, not changed"
    replanned = ranks.run(fit, 4, tight | {"layout": "budgeted", "on_violation": "replan"})[0]
    assert "refuse" not in replanned["levels"]
    for text in ranks.run(failing, 4, tight | {"on_violation": "error"}):
        assert "dense tokens" in text and "sample" in text


def test_wrong_settings_come_at_once() -> None:
    with pytest.raises(ConfigurationError) as caught:
        DCPStrategy(on_violation="error", boundary_budget=8, ring_order="measured", hop_timing=1, fallback=None)
    text = str(caught.value)
    for words in ("boundary_budget=8", "hop_timing=1", "fallback=None"):
        assert words in text
    for options, words in (
        ({"on_violation": "error"}, "no budget that could be broken"),
        ({"on_violation": "stop", "layout": "budgeted"}, "on_violation='stop'"),
        ({"links_file": "links.json"}, "no links are measured"),
        ({"ring_order": "fast"}, "ring_order='fast'"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            trainer_of(options)


@pytest.mark.parametrize("path", [5, 0, b"x", [], {}, True, float("nan"), "", ".", "a\0b"], ids=repr)
@pytest.mark.parametrize("order", ["measured", "rank"])
def test_a_links_file_is_a_path(path: Any, order: str) -> None:
    choice = SteadinessChoice(order, path, True, None, True)
    (problem,) = choice.problems()
    assert "links_file=" in problem.asked and "path of a file" in problem.remedy
    assert not SteadinessChoice("measured", Path("links.json"), True, None, True).problems()


def trainer_of(options: dict[str, Any]) -> Any:
    import lightning.pytorch as L

    return L.Trainer(accelerator="cpu", devices=2, strategy=DCPStrategy(**options), logger=False)


def test_an_explicit_order_is_one_of_the_planes_ranks() -> None:
    with pytest.raises(ConfigurationError, match=r"ring_order=\[0, 1, 1\]"):
        trainer_of({"ring_order": [0, 1, 1]})
