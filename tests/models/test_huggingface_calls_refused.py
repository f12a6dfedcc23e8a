"""Calls of Hugging Face models whose numbers would be others than one process gives, refused with what to do."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn

from lightning_dcp import DCPStrategy
from lightning_dcp.errors import BatchError, ConfigurationError, RegionError
from lightning_dcp.models.discovery import find_regions
from tests.models.families import build
from tests.models.runs import Arm, mask_of, on_ranks, train_arms
from tests.support.ranks import RankPool


def masked_in_step(model: nn.Module, batch: Any) -> Tensor:
    labels = batch["labels"].clone()
    labels[:, :3] = -100
    return model(input_ids=batch["input_ids"], labels=labels, **mask_of(batch)).loss


def labelled_padding(model: nn.Module, batch: Any) -> Tensor:
    labels = batch["labels"].masked_fill(batch["attention_mask"] == 0, 3)
    return model(input_ids=batch["input_ids"], labels=labels, **mask_of(batch)).loss


def generating(model: Any, batch: Any) -> Tensor:
    model.generate(batch["input_ids"], max_new_tokens=2, **mask_of(batch))
    raise AssertionError("a step has generated")


@pytest.mark.parametrize(
    ("step", "error", "words"),
    [
        (masked_in_step, BatchError, "Mask labels in the data set or collate function, not in the step"),
        (labelled_padding, BatchError, "are not -100 in its padding"),
        (generating, RegionError, "To generate, call generate outside a step"),
    ],
)
def test_steps(ranks: RankPool, step: Any, error: type[Exception], words: str) -> None:
    outcomes = ranks.run_all(train_arms, 2, {"arm": Arm("llama", step)}, strategy=on_ranks(2), timeout=60)
    assert not any(ok for ok, _ in outcomes)
    assert any(error.__name__ in text and words in text for _, text in outcomes)


def test_a_part_of_a_model_is_no_region() -> None:
    root = nn.Module()
    root.model = build("llama")
    with pytest.raises(RegionError, match=r"a part of the Hugging Face model 'model'.*name 'model' itself"):
        find_regions(root, ["model.model.layers.0"], forward_overridden=False)
    below_the_head = find_regions(root, ["model.model"], forward_overridden=False)
    assert list(below_the_head.modules) == ["model.model"]


@pytest.mark.parametrize(
    ("regions", "words"),
    [
        ("model", "give a list of attribute paths"),
        ([1], "give a list of attribute paths"),
        (["model", "model"], "named twice"),
        (["model", "model.model"], "inside another region"),
        (["", "model"], "inside another region"),
    ],
)
def test_names_of_regions(regions: Any, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        DCPStrategy(regions=regions)
