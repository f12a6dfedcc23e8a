"""The attention of Hugging Face models, through the interfaces that transformers has for others' attention."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from lightning_dcp.attention.functional import attention
from lightning_dcp.errors import UnsupportedAttentionError
from lightning_dcp.models.huggingface.masks import MaskKind, mask_kind

IMPLEMENTATION = "lightning_dcp"
"""The name under which transformers knows our attention."""
_MASK_MAKERS = ("create_causal_mask", "create_bidirectional_mask", "create_masks_for_generate")
"""Functions of transformers that make masks as the implementation of attention wants them."""


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: MaskKind | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """An attention function for ``transformers.AttentionInterface``.

    Args:
        module: the layer that calls.
        query: ``[1, H, T, D]``.
        key: ``[1, H_kv, T, D]``.
        value: ``[1, H_kv, T, D_v]``.
        attention_mask: what :func:`~.masks.mask_kind` found.
        dropout: of the scores; must be 0.
        scaling: factor of the scores.
        is_causal: overrides the layer's own.
        sliding_window: tokens that a token sees to each side, itself among them.
        softcap: scores are capped smoothly at plus and minus this.
        s_aux: learned sinks, ``[H]``.
        others: what a model passes on for other implementations; tensors that act on scores are refused.

    Returns:
        ``[1, T, H, D_v]``, and no weights.

    Raises:
        UnsupportedAttentionError: what cannot run over a CP group.
    """
    if problems := _problems(attention_mask, others):
        return refused_attention(query, value, problems).transpose(1, 2), None
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    window = sliding_window
    if attention_mask is not None:
        causal, window = attention_mask.is_causal, attention_mask.window
        if sliding_window is not None and window is None:
            window = sliding_window  # a mask without a window beside a layer with one: the narrower of both
    left = -1 if window is None else window - 1
    out = attention(
        query,
        key,
        value,
        is_causal=bool(causal),
        window_size=None if window is None else (left, 0 if causal else left),
        scale=scaling,
        softcap=softcap,
        sinks=s_aux,
        dropout_p=dropout,
    )
    return out.transpose(1, 2).contiguous(), None


def _problems(attention_mask: Any, others: dict[str, Any]) -> list[str]:
    """What cannot run over a CP group, besides what :func:`attention` refuses itself."""
    problems = [
        f"{name} of shape {list(value.shape)}"
        for name, value in others.items()
        if isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 1
    ]
    if not isinstance(attention_mask, MaskKind | None):
        problems.append(f"a mask of the model's own ({type(attention_mask).__name__})")
    elif attention_mask is not None and attention_mask.strange:
        problems.append(f"a mask of the kind {', '.join(attention_mask.strange)}")
    if others.get("output_attentions"):
        problems.append("output_attentions=True, but the weights are on no rank as a whole")
    return problems


def refused_attention(query: Tensor, value: Tensor, problems: list[str]) -> Tensor:
    """Refuse a layer's attention; a function of its own, so that dry runs may note the refusal and go on.

    Args:
        query: ``[1, H, T, D]``.
        value: ``[1, H_kv, T, D_v]``.
        problems: what was found.

    Returns:
        ``[1, H, T, D_v]``, in dry runs only.

    Raises:
        UnsupportedAttentionError: always.
    """
    if has_torch_function((query, value)):
        return handle_torch_function(refused_attention, (query, value), query, value, problems)
    raise UnsupportedAttentionError(
        f"attention of a Hugging Face model with {'; '.join(problems)}, which cannot run over a CP group. Use causal, "
        "bidirectional or sliding-window attention without weights or biases of the scores, or name a region that leaves "
        "this layer out"
    )


AttentionInterface.register(IMPLEMENTATION, attend)
AttentionMaskInterface.register(IMPLEMENTATION, mask_kind)


def implementation_of(model: PreTrainedModel) -> str | None:
    """The implementation of attention that regions serve, by its name in transformers; None if none but the model's own is.

    That is ours where a model goes through transformers' interfaces for attention and masks. One that makes its masks by
    itself makes none for torch's function if no token is padding, and regions serve torch's function, too.
    """
    if not getattr(model, "_supports_attention_backend", False):
        return None
    modules = (sys.modules.get(kind.__module__) for kind in type(model).__mro__)
    masks = any(name in vars(module) for module in modules if module is not None for name in _MASK_MAKERS)
    return IMPLEMENTATION if masks else "sdpa"


@contextmanager
def our_attention(model: PreTrainedModel) -> Iterator[None]:
    """Let a model's layers, and those of models inside it, call our attention; afterwards they call their own again."""
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    # A configuration hands what it is given on to those inside it: all are noted before any is set, and outer ones come first.
    every = (config for part in parts for config in configs(part.config))
    own = {id(config): (config, config._attn_implementation) for config in every}
    try:
        _set_implementations((part.config, implementation_of(part) or own[id(part.config)][1]) for part in parts)
        yield
    finally:
        _set_implementations(own.values())


def _set_implementations(wanted: Iterable[tuple[Any, str | None]]) -> None:
    for config, implementation in wanted:
        if config._attn_implementation != implementation:
            config._attn_implementation = implementation


def configs(config: Any) -> Iterator[Any]:
    """A model's configuration and those inside it, the outer ones first."""
    yield config
    for name in getattr(config, "sub_configs", ()):
        if getattr(config, name, None) is not None:
            yield from configs(getattr(config, name))
