"""``torch.nn.functional.scaled_dot_product_attention`` over a CP group, for models that call it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from lightning_dcp.attention.ring import ring_attention
from lightning_dcp.errors import UnsupportedAttentionError
from lightning_dcp.parallel.context import CPContext

_BACKWARDS = (Tensor.backward, torch.autograd.backward)


_SOFTMAX = {F.softmax, torch.softmax, Tensor.softmax}
_MIXING = {F.conv1d, F.conv2d, torch.conv1d, torch.conv2d, torch.roll, Tensor.roll, torch.cumsum, Tensor.cumsum}
"""Functions that mix neighbouring tokens, and those by which attention is written by hand."""


def _is_attention(context: CPContext, args: Sequence[Any]) -> bool:
    """Whether a softmax is over square scores of the local tokens: attention by hand."""
    tokens, scores = context.num_local_tokens, args[0] if args else None
    return (
        isinstance(scores, Tensor) and scores.dim() > 2 and tuple(scores.shape[-2:]) == (tokens, tokens) and tokens > 1
    )


class ContextParallelAttention(TorchFunctionMode):
    """While active, causal ``scaled_dot_product_attention`` runs over the CP group of one context.

    Entered around a region's forward and around the backward, where activation checkpointing calls the model's layers
    again. The mode belongs to the thread (autograd hands it on to its own threads), the context to the mode: there is
    no global "current group".

    Attributes:
        context: the pack whose attention this is.
        calls: how many attention calls it has served.
    """

    def __init__(self, context: CPContext) -> None:
        super().__init__()
        self.context = context
        self.calls = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Serve attention; pass every other function on."""
        if func in _BACKWARDS and (kwargs or {}).get("inputs") is None:
            return self._backward(*args, **(kwargs or {}))
        if func is F.multi_head_attention_forward:
            raise UnsupportedAttentionError(
                "multi_head_attention_forward inside a context-parallel region: its attention cannot run over a CP "
                "group. Call scaled_dot_product_attention instead, or keep this layer out of the region."
            )
        if func in _MIXING or (func in _SOFTMAX and _is_attention(self.context, args)):
            raise UnsupportedAttentionError(
                f"{getattr(func, '__name__', func)} over tokens inside a context-parallel region, where a rank holds only "
                "a part of them. Attend by scaled_dot_product_attention(..., is_causal=True), or keep this layer out of "
                "the region."
            )
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        self.calls += 1
        return _attention(self.context, *args, **(kwargs or {}))

    def _backward(self, tensors: Tensor | Sequence[Tensor], **options: Any) -> None:
        """Run a backward with this mode on: layers that checkpointing calls again in it need their attention served.

        torch takes a mode off while it handles a function, and a backward is one if it starts at tensors. Started at
        the edges of the graph behind these, it is not handed to modes.
        """
        roots = [tensors] if isinstance(tensors, Tensor) else tensors
        edges = [get_gradient_edge(root) for root in roots]
        if "gradient" in options:
            options["grad_tensors"] = options.pop("gradient")
        with self:
            torch.autograd.backward(edges, **options)


def _attention(
    context: CPContext,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The signature of torch's function, ``[1, H, T_local, D]`` in and out."""
    _refuse_unsupported(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
    query, key, value = (_as_autocast_would(t) for t in (query, key, value))
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
    out = ring_attention(q, k, v, context, scale=scale)
    return out.transpose(0, 1).unsqueeze(0)


def _refuse_unsupported(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    enable_gqa: bool,
) -> None:
    problems = []
    if attn_mask is not None:
        problems.append(
            "attn_mask is given (sample borders are kept without a mask; other masks cannot be sharded yet)"
        )
    if not is_causal:
        problems.append("is_causal is not True (only causal attention runs over a CP group)")
    if dropout_p:
        problems.append(f"dropout_p={dropout_p} (ranks of a group cannot draw one sample's dropout together)")
    no_packs = [
        f"the {name} has shape {tuple(x.shape)}, expected a pack: [1, heads, tokens, head_dim]"
        for name, x in (("query", query), ("key", key), ("value", value))
        if x.dim() != 4 or x.shape[0] != 1
    ]
    problems += no_packs
    if not no_packs and key.shape[1] != query.shape[1] and not enable_gqa:
        problems.append(f"{query.shape[1]} query heads on {key.shape[1]} key heads without enable_gqa=True")
    if problems:
        raise UnsupportedAttentionError(
            "scaled_dot_product_attention inside a context-parallel region: " + "; ".join(problems) + ". "
            "Call it with is_causal=True, attn_mask=None, dropout_p=0.0, or keep this layer out of the region."
        )


def _as_autocast_would(x: Tensor) -> Tensor:
    """Cast as autocast does for attention; it acts below this function, so it cannot do so itself."""
    device = x.device.type
    if torch.is_autocast_enabled(device) and x.is_floating_point() and x.dtype != torch.float64:
        return x.to(torch.get_autocast_dtype(device))
    return x
