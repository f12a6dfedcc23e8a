"""The attention of Hugging Face models, through the interfaces that transformers has for others' attention."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from lightning_dcp.attention.functional import attention
from lightning_dcp.errors import UnsupportedAttentionError
from lightning_dcp.models.huggingface.masks import MaskKind, mask_kind

IMPLEMENTATION = "lightning_dcp"
"""The name under which transformers knows our attention."""


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
    _refuse_others(attention_mask, others)
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


def _refuse_others(attention_mask: Any, others: dict[str, Any]) -> None:
    problems = [
        f"{name} of shape {list(value.shape)}"
        for name, value in others.items()
        if isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 1
    ]
    if not isinstance(attention_mask, MaskKind | None):
        problems.append(f"a mask of the model's own ({type(attention_mask).__name__})")
    if others.get("output_attentions"):
        problems.append("output_attentions=True, but the weights are on no rank as a whole")
    if problems:
        raise UnsupportedAttentionError(
            f"attention of a Hugging Face model with {'; '.join(problems)}. Change the model's configuration, or name a "
            "region that leaves this layer out"
        )


AttentionInterface.register(IMPLEMENTATION, attend)
AttentionMaskInterface.register(IMPLEMENTATION, mask_kind)


@contextmanager
def our_attention(model: PreTrainedModel) -> Iterator[None]:
    """Let a model's layers, and those of models inside it, call our attention; afterwards they call their own again."""
    configs = {id(m.config): m.config for m in model.modules() if isinstance(m, PreTrainedModel)}
    before = [(config, config._attn_implementation) for config in configs.values()]
    for config, own in before:
        if own != IMPLEMENTATION:
            config._attn_implementation = IMPLEMENTATION
    try:
        yield
    finally:
        for config, own in before:
            config._attn_implementation = own
