"""Models whose positions do not begin at 0: RoBERTa and its kin begin behind the row for padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from lightning_dcp.models.huggingface.first_position import first_position
from tests.models.families import TRANSFORMERS_5, build, enlarge
from tests.models.one_rank import in_a_step
from tests.models.regions import on_played_ranks, packed, padded
from tests.models.test_huggingface_isolation import LENGTHS, samples_of
from tests.support.training import VOCAB

SIZES: dict[str, Any] = {
    **{
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    },
    **{"max_position_embeddings": 64, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    **{"bos_token_id": 1, "eos_token_id": 2},
}
BEHIND_PADDING = ["roberta", "xlm-roberta", "camembert"]
if TRANSFORMERS_5:  # in 4.57 these attend by hand, and are refused
    BEHIND_PADDING += ["data2vec-text", "roberta-prelayernorm"]
PADDING = 0


def made(kind: str, auto: Any = AutoModelForCausalLM, padding: int = PADDING, **own: Any) -> nn.Module:
    torch.manual_seed(1)
    config = AutoConfig.for_model(kind, **SIZES, pad_token_id=padding, **own)
    return enlarge(auto.from_config(config)).double().eval()


def logits(model: Any, batch: Any) -> Tensor:
    return model(input_ids=batch["input_ids"]).logits.detach()


def from_zero(model: Any, batch: Any) -> Tensor:
    positions = torch.cat([torch.arange(n) for n in batch.lengths]).unsqueeze(0)
    return model(input_ids=batch["input_ids"], position_ids=positions).logits.detach()


@pytest.mark.parametrize("kind", BEHIND_PADDING)
def test_they_are_told_positions_that_begin_where_theirs_do(kind: str) -> None:
    model, samples = made(kind, is_decoder=True), samples_of(LENGTHS)
    alone = [model(input_ids=ids.unsqueeze(0)).logits.detach() for ids in samples]
    for size in (1, 2, 4):
        for out in on_played_ranks(model, packed(samples), size, logits):
            torch.testing.assert_close(out, torch.cat(alone, dim=1), rtol=1e-9, atol=1e-9)


def test_positions_of_the_users_stay_what_they_are() -> None:
    model, samples = made("roberta", is_decoder=True), samples_of(LENGTHS)
    alone = [
        model(input_ids=ids.unsqueeze(0), position_ids=torch.arange(len(ids)).unsqueeze(0)).logits.detach()
        for ids in samples
    ]
    for out in on_played_ranks(model, packed(samples), 2, from_zero):
        torch.testing.assert_close(out, torch.cat(alone, dim=1), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("padding", [0, 1])
def test_a_classifier_is_right_by_its_base(padding: int) -> None:
    model = made("roberta", AutoModelForSequenceClassification, padding)
    batch = padded([ids.clamp(min=2) for ids in samples_of((9, 6))])
    batch["input_ids"][1, 6:] = padding
    given = {name: batch[name] for name in ("input_ids", "attention_mask")}
    expected = model(**given).logits.detach()
    with in_a_step(model, {**given, "labels": torch.tensor([0, 1])}):
        found = model(**given).logits.detach()
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_first_positions() -> None:
    assert first_position(made("roberta", padding=1, is_decoder=True)) == 2
    assert first_position(build("llama")) == first_position(build("gpt2")) == first_position(build("opt")) == 0
