"""The fused loss takes a model's head as it is: found to be plain at set-up, and looked up at every call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, LlamaForCausalLM

from lightning_dcp.errors import RegionError
from lightning_dcp.models.huggingface.adapter import TransformerAdapter
from tests.models.families import build, config_of
from tests.models.one_rank import in_a_step
from tests.models.regions import packed
from tests.models.test_huggingface_isolation import samples_of

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


class Scaled(LlamaForCausalLM):
    """Does something to its logits that its configuration says nothing of."""

    factor = 1.0

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, **others: Any) -> Any:
        out = super().forward(input_ids, position_ids=position_ids, **others)
        out["logits"] = out.logits * self.factor
        return out


def found(model: nn.Module, **options: Any) -> str:
    """What set-up has against the fused loss of a model."""
    adapter = TransformerAdapter(model, fused=True)
    problems = [*adapter.problems("model"), *adapter.problems_on_device("model", **options)]
    return "; ".join(problem.found for problem in problems)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logits_made_in_another_way_are_seen_in_every_precision(dtype: torch.dtype) -> None:
    model = Scaled(config_of("llama")).to(dtype)
    assert found(model) == ""
    for factor in (2.0, 1.2, 0.7, -0.5):
        model.factor = factor
        assert "not what its output layer makes" in found(model)


def test_scales_and_caps_of_the_configuration_pass_in_16_bits() -> None:
    for family in ("gemma2", "granite", "cohere"):
        assert found(build(family).to(torch.bfloat16)) == ""


def test_units_dropped_in_training_are_no_difference() -> None:
    assert found(build("gpt2", resid_pdrop=0.5, embd_pdrop=0.5).train()) == ""


def test_hooks_of_the_head_would_not_be_called() -> None:
    model = build("llama")
    handle = model.lm_head.register_forward_hook(lambda layer, given, out: out * 2)
    assert "has hooks" in found(model)
    handle.remove()
    assert found(model) == ""
    model.lm_head.register_full_backward_hook(lambda *_: None)
    assert "has hooks" in found(model)


def test_a_head_whose_forward_was_replaced_is_seen() -> None:
    model = build("llama")
    model.lm_head.forward = lambda hidden: 2 * torch.nn.functional.linear(hidden, model.lm_head.weight)
    assert "not what its output layer makes" in found(model)


def test_it_is_looked_at_in_the_precision_and_with_the_attention_of_the_run() -> None:
    def fails(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("the model's own attention was called")

    AttentionInterface.register("fails_in_tests", fails)
    model, seen = build("llama", attention="fails_in_tests"), []
    head = model.lm_head.forward

    def watched(hidden: Tensor) -> Tensor:
        seen.append(torch.is_autocast_enabled("cpu"))
        return head(hidden)

    @contextmanager
    def mixed() -> Iterator[None]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            yield

    model.lm_head.forward = watched
    assert found(model, forward_context=mixed) == ""
    assert seen == [True]
    assert model.config._attn_implementation == "fails_in_tests"


def loss(model: Any, batch: Any) -> Tensor:
    return model(input_ids=batch["input_ids"], labels=batch["labels"]).loss.detach()


def test_a_head_that_is_resized_after_set_up_is_the_one_that_counts() -> None:
    model, batch = build("llama").double(), packed(samples_of((6, 5)))
    with in_a_step(model, batch, fused=True):
        before = loss(model, batch)
        model.resize_token_embeddings(64, mean_resizing=False)
        nn.init.normal_(model.lm_head.weight)
        after = loss(model, batch)
    assert abs(after - before) > 1e-3
    with in_a_step(model, batch):
        torch.testing.assert_close(after, loss(model, batch).double(), rtol=1e-6, atol=0)


def test_hooks_that_the_head_gets_after_set_up_are_refused() -> None:
    model, batch = build("llama"), packed(samples_of((6, 5)))
    with in_a_step(model, batch, fused=True):
        model.lm_head.register_forward_hook(lambda layer, given, out: out * 2)
        with pytest.raises(RegionError, match="has hooks"):
            loss(model, batch)
