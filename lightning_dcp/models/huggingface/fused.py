"""The loss of a Hugging Face causal model from its hidden states, without logits."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from lightning_dcp.errors import RegionError
from lightning_dcp.loss.linear_cross_entropy import linear_cross_entropy
from lightning_dcp.models.call import RegionCall
from lightning_dcp.models.huggingface.loss import Labels, count_targets
from lightning_dcp.models.undisturbed import undisturbed

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

SAME = 8
"""Logits that differ from each other by no more than so many roundings of their norm are the same."""


@dataclass(frozen=True)
class FusedHead:
    """How a model makes logits of hidden states.

    Attributes:
        head: its last layer.
        softcap: logits are capped smoothly at plus and minus this; None for no cap.
        scale: factor of the logits, before the cap.
    """

    head: nn.Linear
    softcap: float | None
    scale: float

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits ``[..., V]`` of hidden states ``[..., H]``, as a whole."""
        # not by calling the head: the loss takes its weight and bias, and nothing else that a call of it would do
        logits = F.linear(hidden, self.head.weight, self.head.bias) * self.scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


def base_of(model: PreTrainedModel) -> nn.Module:
    """The model below the head.

    Raises:
        RegionError: it is neither where the class says, nor an attribute ``model``.
    """
    base: Any = model.base_model
    if base is model:  # its class names an attribute that it does not have: Gemma 3 in transformers 4.57
        base = getattr(model, "model", None)
    if not isinstance(base, PreTrainedModel):
        raise RegionError("the model below its output layer was not found")
    return base


def fused_head(model: PreTrainedModel) -> FusedHead:
    """The head of a model, as far as its configuration tells.

    Raises:
        RegionError: no plain linear layer, one with hooks, or a loss function of the user's own.
    """
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        raise RegionError(f"its output layer is {type(head).__name__}, not a plain Linear")
    if any(getattr(head, hooks) for hooks in _HOOKS):
        raise RegionError(f"its output layer ({type(head).__name__}) has hooks, and nothing would call them")
    base_of(model)
    if hasattr(model, "_loss_function"):
        raise RegionError("it has a loss function of its own (model.loss_function was set)")
    config = model.config.get_text_config()
    divisor = getattr(config, "logits_scaling", None)  # Granite
    scale = getattr(config, "logit_scale", None)  # Cohere
    factor = (1.0 if scale is None else float(scale)) / (1.0 if divisor is None else float(divisor))
    return FusedHead(head, getattr(config, "final_logit_softcapping", None), factor)


def check_fused_head(
    model: PreTrainedModel,
    head: FusedHead,
    forward_context: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> None:
    """Compare a few logits of the model with those that the head makes of its hidden states; nothing of the model changes.

    Args:
        model: on its device.
        head: what :func:`fused_head` found.
        forward_context: the precision plugin's context for a forward.

    Raises:
        RegionError: the model makes its logits in another way.
    """
    ids = torch.arange(1, 4, device=head.head.weight.device).unsqueeze(0) % model.config.get_text_config().vocab_size
    with undisturbed(model, ids.device), forward_context():
        model.eval()  # the two calls would drop other units
        hidden = base_of(model)(input_ids=ids, use_cache=False, return_dict=True).last_hidden_state
        ours, own = head.logits(hidden), model(input_ids=ids, use_cache=False, return_dict=True).logits
    eps = max(torch.finfo(tensor.dtype).eps for tensor in (head.head.weight, ours, own))
    difference = (ours.double() - own.double()).norm() if ours.shape == own.shape else float("inf")
    if not difference <= SAME * eps * own.double().norm():
        raise RegionError("its logits are not what its output layer makes of the last hidden states")


def fused_loss(call: RegionCall, model: PreTrainedModel, head: FusedHead, asked: Labels) -> CausalLMOutputWithPast:
    """Run a call without its head, and compute the loss of each token from its hidden state.

    Returns:
        An output with ``.loss``, and hidden states if they were asked for; ``.logits`` is None.
    """
    out = call.run(partial(_base_output, base_of(model)), all_ones=True)
    losses = _losses(out.last_hidden_state[0], head, call.local_targets(asked.targets)[0])
    divisor: Any = asked.options.get("num_items_in_batch")
    if divisor is None:
        divisor = count_targets(asked.targets)
    total = (call.whole(losses.unsqueeze(0)) if call.pack.sharded else call.packed(losses.unsqueeze(0))).sum()
    states = call.gathered(out.hidden_states) if out.get("hidden_states") is not None else None
    return CausalLMOutputWithPast(loss=total / divisor, hidden_states=states)


def _base_output(base: nn.Module, **arguments: Any) -> Any:
    return base(**arguments)


def _losses(hidden: Tensor, head: FusedHead, targets: Tensor) -> Tensor:
    return linear_cross_entropy(
        hidden,
        head.head.weight,
        targets,
        bias=head.head.bias,
        softcap=head.softcap,
        logit_scale=head.scale,
        reduction="none",
    )
