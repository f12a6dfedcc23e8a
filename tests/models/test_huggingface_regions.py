"""Which parts of a module are regions, where there are Hugging Face models in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification

from lightning_dcp.errors import RegionError
from lightning_dcp.models.discovery import find_regions
from lightning_dcp.models.huggingface.adapter import TransformerAdapter
from tests.models.arms import Wrapped, with_lora
from tests.models.families import build, config_of
from tests.support.training import VOCAB


class Holder(nn.Module):
    """Parts by name."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)


class OfOne(Holder):
    """A module whose own forward takes positions, and hands them to a model inside."""

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Any:
        return self.model(input_ids=input_ids, position_ids=position_ids).logits


def classifier() -> nn.Module:
    return AutoModelForSequenceClassification.from_config(config_of("llama"))


def _cases() -> Iterator[tuple[str, Callable[[], nn.Module], list[str]]]:
    yield "one", lambda: Holder(model=build("llama")), ["model"]
    yield (
        "policy and reference",
        lambda: Holder(p=build("llama"), ref=build("llama"), head=nn.Linear(16, 1)),
        ["p", "ref"],
    )
    yield (
        "in a dict",
        lambda: Holder(models=nn.ModuleDict({"a": build("llama"), "b": build("gpt2")})),
        ["models.a", "models.b"],
    )
    yield "in a wrapper", lambda: Holder(wrapper=Holder(inner=build("llama"))), ["wrapper.inner"]
    yield "a body", lambda: Holder(body=build("llama").model, head=nn.Linear(16, VOCAB)), ["body"]
    yield "compiled", lambda: Holder(model=torch.compile(build("llama"), backend="eager")), ["model"]


@pytest.mark.parametrize(("make", "expected"), [(m, e) for _, m, e in _cases()], ids=[name for name, _, _ in _cases()])
def test_regions_are_found(make: Callable[[], nn.Module], expected: list[str]) -> None:
    assert sorted(find_regions(make(), None, forward_overridden=False).modules) == expected


@pytest.mark.parametrize("parts", [{}, {"head": nn.Linear(16, VOCAB)}])
def test_models_come_before_the_forward_around_them(parts: dict[str, nn.Module]) -> None:
    regions = find_regions(OfOne(model=build("llama"), **parts), None, forward_overridden=True)
    assert list(regions.modules) == ["model"]
    assert isinstance(regions.adapters["model"], TransformerAdapter)


def _named() -> Iterator[tuple[str, Callable[[], nn.Module], str, str]]:
    yield "a model", lambda: Holder(model=build("llama")), "model", "model"
    yield "peft", lambda: Holder(model=with_lora(build("llama"))), "model", "model.base_model.model"
    yield "a wrapper", lambda: Holder(model=Wrapped(build("llama"))), "model", "model.inner"
    yield "the module itself", lambda: Holder(model=build("llama")), "", "model"
    yield "a classifier", lambda: Holder(model=classifier()), "model", "model.model"
    yield "a wrapped classifier", lambda: Holder(model=Wrapped(classifier())), "model", "model.inner.model"


@pytest.mark.parametrize(
    ("make", "name", "expected"), [case[1:] for case in _named()], ids=[name for name, *_ in _named()]
)
def test_a_name_stands_for_the_model_that_it_means(make: Callable[[], nn.Module], name: str, expected: str) -> None:
    root = make()
    regions = find_regions(root, [name], forward_overridden=False)
    assert list(regions.modules) == [expected]
    assert regions.modules[expected] is root.get_submodule(expected)
    assert isinstance(regions.adapters[expected], TransformerAdapter)


def test_a_name_of_several_models_is_refused() -> None:
    two = Holder(both=Holder(a=build("llama"), b=build("llama")))
    with pytest.raises(RegionError, match=r"Holder.forward has no argument for positions"):
        find_regions(two, ["both"], forward_overridden=False)
