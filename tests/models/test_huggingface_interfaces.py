"""What is told to, and read from, transformers' interfaces: implementations of attention, masks, outputs, losses' divisors."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoModel

from lightning_dcp.errors import BatchError, UnsupportedAttentionError
from lightning_dcp.models.dry_run import dry_run
from lightning_dcp.models.huggingface.adapter import TransformerAdapter
from lightning_dcp.models.huggingface.attention import IMPLEMENTATION, our_attention
from lightning_dcp.models.huggingface.masks import MaskKind
from tests.models.families import TRANSFORMERS_5, build, config_of
from tests.models.one_rank import in_a_step
from tests.models.regions import on_played_ranks, packed, padded
from tests.models.test_huggingface_isolation import samples_of
from tests.models.test_huggingface_positions import SIZES, made

# --- implementations of attention


def composite() -> Any:
    """A model of images and text; each part has another implementation of attention."""
    text = config_of("gemma3").to_dict()
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Gemma3Config(text_config=text, vision_config=vision | {"image_size": 28, "patch_size": 14})
    model = transformers.Gemma3ForConditionalGeneration(config)
    model.config._attn_implementation = "sdpa"
    model.config.text_config._attn_implementation = "eager"
    return model


def implementations(model: Any) -> tuple[str, str, str]:
    config = model.config
    return tuple(part._attn_implementation for part in (config, config.text_config, config.vision_config))  # type: ignore[return-value]


def test_each_part_of_a_composite_model_gets_its_own_attention_back() -> None:
    model = composite()
    assert implementations(model) == ("sdpa", "eager", "sdpa")
    with our_attention(model):
        assert implementations(model)[1] == IMPLEMENTATION
    assert implementations(model) == ("sdpa", "eager", "sdpa")
    with pytest.raises(ValueError, match="on purpose"), our_attention(model):
        raise ValueError("on purpose")
    assert implementations(model) == ("sdpa", "eager", "sdpa")


# --- masks


def test_a_mask_that_is_read_is_refused_with_what_was_read() -> None:
    kind = MaskKind(is_causal=True, window=None)
    for use, read in {
        ".dtype": lambda: kind.dtype,
        ".shape": lambda: kind.shape,
        "[...]": lambda: kind[:, :, 0],
        " + ...": lambda: torch.zeros(2) + kind,
    }.items():
        with pytest.raises(UnsupportedAttentionError) as refusal:
            read()
        assert f"reads its mask (attention_mask{use})" in str(refusal.value)
    assert not hasattr(kind, "dtype")
    assert copy.deepcopy(kind) == kind


@pytest.mark.skipif(not TRANSFORMERS_5, reason="its own attention in 4.57")
@pytest.mark.parametrize("half", [1, 2, 6])
def test_windows_to_both_sides(half: int) -> None:
    """ModernBERT's sees ``half`` tokens to each side, and the token itself."""
    own = {"global_attn_every_n_layers": 3, "local_attention": 2 * half, "num_hidden_layers": 3}
    dropout = {"embedding_dropout": 0.0, "mlp_dropout": 0.0, "attention_dropout": 0.0}
    ids = {"cls_token_id": 1, "sep_token_id": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    model = AutoModel.from_config(transformers.ModernBertConfig(**(SIZES | own | dropout | ids))).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(10) if parameter.dim() > 1 else None
    adapter = TransformerAdapter(model)
    assert not list(adapter.problems("model"))
    assert not dry_run(model, adapter=adapter).findings
    samples = samples_of((13, 9))
    alone = [model(input_ids=ids.unsqueeze(0)).last_hidden_state.detach() for ids in samples]
    for size in (1, 2):
        for out in on_played_ranks(model, packed(samples), size, states):
            torch.testing.assert_close(out, torch.cat(alone, dim=1), rtol=1e-6, atol=1e-6)


def states(model: Any, batch: Any) -> Tensor:
    return model(input_ids=batch["input_ids"]).last_hidden_state.detach()


# --- outputs


@pytest.mark.parametrize("configured", [True, False])
@pytest.mark.parametrize("asked", [None, True, False])
@pytest.mark.parametrize("labelled", [False, True])
def test_a_tuple_or_not_as_configured_or_asked(configured: bool, asked: bool | None, labelled: bool) -> None:
    model = made("bert", is_decoder=True)  # not every model of transformers can have it in its configuration
    model.config.return_dict = configured
    batch = packed(samples_of((6, 5)))
    given: dict[str, Any] = {"input_ids": batch["input_ids"]} | ({} if asked is None else {"return_dict": asked})
    given |= {"labels": batch["labels"]} if labelled else {}
    with in_a_step(model, batch):
        out = model(**given)
    whole = configured if asked is None else asked
    assert isinstance(out, tuple) != whole
    assert out[1 if labelled else 0].shape[:2] == batch["input_ids"].shape


# --- what a sum of losses is divided by


@pytest.mark.parametrize(
    ("normalization", "items", "of_batch", "refused"),
    [
        ("sum", 8, 8, False),  # the other samples of the batch have no targets
        ("sum", 8, 20, True),
        ("sum", 8, None, True),
        ("sum", 20, 20, False),
        ("tokens", 8, 20, False),
        ("tokens", 8, 8, False),
        ("tokens", 20, 20, True),
    ],
)
def test_numbers_of_items(normalization: str, items: int, of_batch: int | None, refused: bool) -> None:
    model, batch = build("llama"), padded(samples_of((6, 4)))
    pack = {"normalization": normalization, "count_batch_targets": lambda: of_batch}

    def loss(**options: Any) -> Tensor:
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "labels")}
        return model(**inputs, **options).loss.detach()

    with in_a_step(model, batch, **pack):
        if refused:
            with pytest.raises(BatchError, match=f"num_items_in_batch={items}"):
                loss(num_items_in_batch=items)
        else:
            torch.testing.assert_close(loss(num_items_in_batch=items) * items, loss() * 8)
