"""The ways in which people use Hugging Face models, under the strategy and in one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, DataCollatorWithFlattening, PreTrainedModel

from lightning_dcp.data import COLLATORS
from tests.models.arms import OPTIONS, compiled, with_prefix, with_prompt
from tests.models.families import enlarge
from tests.models.oracle import DENSE
from tests.models.runs import LENGTHS, Arm, assert_arm, mask_of, on_ranks, once, own_loss, train_arms
from tests.support.ranks import RankPool
from tests.support.training import RaggedTokens

SLOW = pytest.mark.slow
Run = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="module")
def trained(ranks: RankPool) -> Run:
    """Runs of many options at once, each made once; world 0 is plain Lightning on one process."""

    @once
    def run(world: int, fmt: str = "padded") -> list[dict[str, Any]]:
        strategy = on_ranks(world) if world else None
        return ranks.run(train_arms, max(world, 1), OPTIONS, strategy=strategy, fmt=fmt, timeout=300)

    return run


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize(("world", "fmt"), [(4, "padded"), pytest.param(2, "packed", marks=SLOW)])
def test_options(trained: Run, option: str, world: int, fmt: str) -> None:
    assert_arm(option, trained(world, fmt), trained(0)[0])


# --- runs of their own: other batches, another loss


def train_variant(name: str, strategy: dict[str, Any] | None) -> dict[str, Any]:
    """A job: train one of the variants."""
    arms, batches = VARIANTS[name]
    log = {"reduce_fx": "sum"} if name == "items" else {}
    return train_arms(arms, strategy=strategy, batches=batches(), log=log)


def left_padded(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Rows that end with their last token."""
    batch = COLLATORS["padded"](samples)
    shifts = (batch["attention_mask"] == 0).sum(1).tolist()
    for name in ("input_ids", "attention_mask", "labels"):
        batch[name] = torch.stack([row.roll(shift) for row, shift in zip(batch[name], shifts, strict=True)])
    return batch


def flattened(samples: Sequence[Mapping[str, Any]], **options: Any) -> dict[str, Any]:
    lists = [{name: sample[name].tolist() for name in ("input_ids", "labels")} for sample in samples]
    return dict(DataCollatorWithFlattening(return_tensors="pt", **options)(lists))


def flattened_for_flash(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return flattened(samples, return_flash_attn_kwargs=True, return_seq_idx=True)


def counted(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A padded batch that says how many targets it has, as transformers' Trainer does."""
    batch = COLLATORS["padded"](samples)
    return batch | {"items": (batch["labels"][:, 1:] != -100).sum()}


def classified(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A padded batch with one label a sample."""
    batch = COLLATORS["padded"](samples)
    return batch | {"labels": torch.tensor([sample["index"] % 3 for sample in samples])}


def all_of_batch(model: nn.Module, batch: Any) -> Tensor:
    """Everything that a collator made goes to the model."""
    return model(**{name: value for name, value in batch.items() if name != "index"}).loss


def items_of_batch(model: nn.Module, batch: Any) -> Tensor:
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "labels")}
    return model(**inputs, num_items_in_batch=batch["items"]).loss


def last_logits(model: nn.Module, batch: Any) -> Tensor:
    """A loss of the last token of each row alone."""
    logits = model(batch["input_ids"], logits_to_keep=2, **mask_of(batch)).logits
    assert logits.shape[1] == 2
    return F.cross_entropy(logits[:, -1], batch["input_ids"][:, -1])


def loss_behind_prompt(model: nn.Module, batch: Any) -> Tensor:
    """Without the targets that only a prompt predicts."""
    labels = batch["labels"].clone()
    labels[:, 0] = -100
    return model(input_ids=batch["input_ids"], labels=labels, **mask_of(batch)).loss


def classifier(model: PreTrainedModel) -> nn.Module:
    torch.manual_seed(4)
    config = model.config
    config.num_labels = 3
    return enlarge(AutoModelForSequenceClassification.from_config(config, attn_implementation=DENSE))


def batches_of(collate: Callable[..., Any]) -> Callable[[], DataLoader]:
    return lambda: DataLoader(RaggedTokens(LENGTHS), batch_size=6, collate_fn=collate)


THREE = {name: Arm(name) for name in ("llama", "gemma3", "gpt2")}
PROMPT = {"llama": Arm("llama", loss_behind_prompt, with_prompt)}
VARIANTS: dict[str, tuple[dict[str, Arm], Callable[[], DataLoader]]] = {
    "right": (THREE, batches_of(COLLATORS["padded"])),
    "left": (THREE, batches_of(left_padded)),
    "flattened": ({name: Arm(name, all_of_batch) for name in THREE}, batches_of(flattened)),
    "flattened for flash": ({name: Arm(name, all_of_batch) for name in THREE}, batches_of(flattened_for_flash)),
    "items": ({"llama": Arm("llama", items_of_batch)}, batches_of(counted)),
    "last": ({"llama": Arm("llama", last_logits)}, batches_of(left_padded)),
    "classifier": ({"llama": Arm("llama", own_loss, classifier)}, batches_of(classified)),
    "prompt tuning": (PROMPT, batches_of(COLLATORS["padded"])),
    "compiled": ({"llama": Arm("llama", own_loss, compiled)}, batches_of(COLLATORS["padded"])),
}


@pytest.mark.parametrize(
    ("variant", "oracle", "strategy"),
    [
        ("left", "right", {}),  # positions begin at the first real token, whatever a model would make of padding
        ("flattened", "right", {}),
        pytest.param("flattened for flash", "right", {}, marks=SLOW),
        ("items", "items", {"loss_normalization": "sum"}),
        pytest.param("items", "items", {"loss_normalization": "sum", "fused_linear_cross_entropy": True}, marks=SLOW),
        ("prompt tuning", "prompt tuning", {"max_seqlen_per_dp_cp_rank": 40}),  # room for the prompts' tokens
        pytest.param("last", "last", {"loss_normalization": "samples"}, marks=SLOW),
        ("classifier", "classifier", {"loss_normalization": "samples"}),
        pytest.param("classifier", "classifier", {}, marks=SLOW),  # one label a sample is one target
        pytest.param("compiled", "compiled", {}, marks=SLOW),
    ],
)
def test_other_batches_and_losses(ranks: RankPool, variant: str, oracle: str, strategy: dict[str, Any]) -> None:
    expected = ranks.run(train_variant, 1, oracle, None)[0]
    ours = ranks.run(train_variant, 4, variant, on_ranks(4, **strategy), timeout=240)
    for name in VARIANTS[variant][0]:
        assert_arm(name, ours, expected)


# --- refused


def refused_variant(name: str, strategy: dict[str, Any], fmt: str) -> str:
    """A job: the error of a run that must not be."""
    arms = {"model": REFUSED[name]}
    if name == "items":
        return str(_error(arms, strategy, VARIANTS["items"][1]()))
    return str(_error(arms, strategy, None, fmt))


def _error(arms: dict[str, Arm], strategy: dict[str, Any], batches: Any, fmt: str = "padded") -> BaseException:
    try:
        train_arms(arms, strategy=strategy, batches=batches, fmt=fmt)
    except Exception as error:
        return error
    raise AssertionError("nothing was refused")


def cached(model: nn.Module, batch: Any) -> Tensor:
    return model(batch["input_ids"], use_cache=True, labels=batch["labels"]).loss


def attentions(model: nn.Module, batch: Any) -> Tensor:
    return model(batch["input_ids"], output_attentions=True, labels=batch["labels"]).loss


REFUSED = {
    "items": Arm("llama", items_of_batch),
    "own items": OPTIONS["own number of items"],
    "prompt tuning": PROMPT["llama"],
    "first tokens behind a prompt": Arm("llama", own_loss, with_prompt),
    "prefix tuning": Arm("llama", own_loss, with_prefix),
    "cache": Arm("llama", cached),
    "attentions": Arm("llama", attentions),
}


@pytest.mark.parametrize(
    ("name", "strategy", "fmt", "words"),
    [
        ("items", {}, "padded", ["num_items_in_batch", "not the pack's", 'loss_normalization="sum"']),
        ("own items", {"loss_normalization": "sum"}, "padded", ["num_items_in_batch", "the pack's own", '"tokens"']),
        ("prompt tuning", {}, "packed", ["shape [1,"]),
        ("first tokens behind a prompt", {}, "padded", ["a mean over", "set its label to -100"]),
        ("prefix tuning", {}, "padded", ["past_key_values", "leave it out"]),
        ("cache", {}, "padded", ["use_cache", "leave it out"]),
        ("attentions", {}, "padded", ["output_attentions", "leave it out"]),
    ],
)
def test_refused_calls(ranks: RankPool, name: str, strategy: dict[str, Any], fmt: str, words: list[str]) -> None:
    # on one rank, so that every batch has several packs and no other rank waits for one that has failed
    text = ranks.run(refused_variant, 1, name, on_ranks(1, max_seqlen_per_dp_cp_rank=90, **strategy), fmt)[0]
    for word in words:
        assert word in text


def test_float32_inside_transformers(ranks: RankPool) -> None:
    """With transformers' own norms, rotations and losses in float32, and all else in float64."""
    options = {"exact": False, "lr": 0.1}
    expected = ranks.run(train_arms, 1, THREE, strategy=None, **options)[0]
    ours = ranks.run(train_arms, 4, THREE, strategy=on_ranks(4), fmt="packed", **options)
    for name in THREE:
        assert_arm(name, ours, expected, 1e-6)
    with pytest.raises(AssertionError):
        assert_arm("llama", ours, expected, 1e-12)
