"""The ways in which people use Hugging Face models, each as an arm of a module."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from lightning_dcp.batch.labels import shifted_labels
from tests.models.runs import Arm, loss_of_logits, mask_of, own_loss
from tests.support.training import VOCAB


def positions_given(model: nn.Module, batch: Any) -> Tensor:
    if "attention_mask" in batch:
        positions = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    else:
        positions = torch.cat([torch.arange(n) for n in batch.lengths]).unsqueeze(0)
    given = {"input_ids": batch["input_ids"], "labels": batch["labels"], "position_ids": positions}
    return model(**given, **mask_of(batch)).loss


def shifted_given(model: nn.Module, batch: Any) -> Tensor:
    """As transformers has it, labels beside shifted ones only say that a loss is wanted."""
    shifted = shifted_labels(batch)
    labels = torch.zeros_like(shifted)
    return model(input_ids=batch["input_ids"], labels=labels, shift_labels=shifted, **mask_of(batch)).loss


def own_count_given(model: nn.Module, batch: Any) -> Tensor:
    items = (shifted_labels(batch) != -100).sum()
    return model(
        input_ids=batch["input_ids"], labels=batch["labels"], num_items_in_batch=items.clamp(min=1), **mask_of(batch)
    ).loss


def hidden_states(model: nn.Module, batch: Any) -> Tensor:
    """A loss of the logits, and of the states between layers."""
    out = model(batch["input_ids"], output_hidden_states=True, **mask_of(batch))
    targets = shifted_labels(batch)
    states = torch.stack(out.hidden_states)[:, targets != -100]
    return loss_of_logits(out.logits, batch) + 0.1 * states.square().mean()


def as_tuple(model: nn.Module, batch: Any) -> Tensor:
    loss, logits, *_ = model(batch["input_ids"], labels=batch["labels"], return_dict=False, **mask_of(batch))
    assert logits.shape[-1] == VOCAB
    return loss


def embeddings_given(model: Any, batch: Any) -> Tensor:
    embeddings = model.get_input_embeddings()(batch["input_ids"]) * 1.5
    return model(inputs_embeds=embeddings, labels=batch["labels"], **mask_of(batch)).loss


def states_and_head(model: Any, batch: Any) -> Tensor:
    states = model["body"](batch["input_ids"], **mask_of(batch)).last_hidden_state
    return loss_of_logits(model["head"](states), batch)


def body_and_head(model: PreTrainedModel) -> nn.Module:
    torch.manual_seed(5)
    return nn.ModuleDict({"body": model.model, "head": nn.Linear(16, VOCAB)})


def distilled(model: Any, batch: Any) -> Tensor:
    """A frozen teacher beside a student."""
    with torch.no_grad():
        teacher = model["teacher"](batch["input_ids"], **mask_of(batch)).logits
    out = model["student"](batch["input_ids"], labels=batch["labels"], **mask_of(batch))
    keep = shifted_labels(batch) != -100
    divergence = F.kl_div(out.logits[keep].log_softmax(-1), teacher[keep].softmax(-1), reduction="none").sum(-1).mean()
    return out.loss + divergence


def with_teacher(model: PreTrainedModel) -> nn.Module:
    teacher = copy.deepcopy(model).requires_grad_(False)
    for parameter in teacher.parameters():
        parameter.mul_(0.9)
    return nn.ModuleDict({"student": model, "teacher": teacher})


class Wrapped(nn.Module):
    """A wrapper as people write it, whose forward says nothing of its arguments."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = model

    def forward(self, **inputs: Any) -> Any:
        return self.inner(**inputs)


def checkpointed(model: PreTrainedModel, *, reentrant: bool) -> nn.Module:
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    return model.train()


def with_lora(model: PreTrainedModel) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(7)
    return get_peft_model(
        model, LoraConfig(r=2, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    )


def with_lora_and_checkpoints(model: PreTrainedModel) -> nn.Module:
    return with_lora(checkpointed(model, reentrant=False))


def with_prompt(model: PreTrainedModel) -> nn.Module:
    from peft import PromptTuningConfig, get_peft_model

    torch.manual_seed(8)
    return get_peft_model(model, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))


def with_prefix(model: PreTrainedModel) -> nn.Module:
    from peft import PrefixTuningConfig, get_peft_model

    return get_peft_model(model, PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))


def compiled(model: PreTrainedModel) -> nn.Module:
    return torch.compile(model, backend="eager", dynamic=True)


OPTIONS = {
    "positions given": Arm("llama", positions_given),
    "learned positions given": Arm("gpt2", positions_given),
    "shifted labels given": Arm("llama", shifted_given),
    "own number of items": Arm("llama", own_count_given),
    "hidden states": Arm("gemma2", hidden_states),
    "tuple": Arm("llama", as_tuple),
    "embeddings given": Arm("llama", embeddings_given),
    "head outside": Arm("qwen3", states_and_head, body_and_head),
    "teacher and student": Arm("llama", distilled, with_teacher),
    "wrapped": Arm("mistral", own_loss, Wrapped),
    "checkpointed": Arm("gemma2", own_loss, partial(checkpointed, reentrant=False)),
    "checkpointed, reentrant": Arm("gpt-oss", own_loss, partial(checkpointed, reentrant=True)),
    "lora": Arm("llama", own_loss, with_lora),
    "lora, checkpointed": Arm("qwen2", own_loss, with_lora_and_checkpoints),
    "tied": Arm("llama", own_loss, changes={"tie_word_embeddings": True}),
}
"""What padded batches and packed ones can be used for."""
