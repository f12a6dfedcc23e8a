"""Attention over a CP group for models that call torch's function, or :func:`~lightning_dcp.attention.attention`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from lightning_dcp.attention.functional import attention, serve_attention, serve_scaled_dot_product_attention
from lightning_dcp.attention.options import AttentionOptions
from lightning_dcp.errors import UnsupportedAttentionError
from lightning_dcp.parallel.context import CPContext

_BACKWARDS = (Tensor.backward, torch.autograd.backward)
_SERVED: dict[Callable[..., Any], Callable[..., Tensor]] = {
    F.scaled_dot_product_attention: serve_scaled_dot_product_attention,
    attention: serve_attention,
}

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
    """While active, ``scaled_dot_product_attention`` and :func:`attention` run over the CP group of one context.

    Entered around a region's forward and around the backward, where activation checkpointing calls the model's layers
    again. The mode belongs to the thread (autograd hands it on to its own threads), the context to the mode: there is
    no global "current group".

    Attributes:
        context: the pack whose attention this is.
        options: how it is computed.
        calls: how many attention calls it has served.
    """

    def __init__(self, context: CPContext, options: AttentionOptions = AttentionOptions()) -> None:  # noqa: B008  (frozen)
        super().__init__()
        self.context, self.options = context, options
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
        serve = _SERVED.get(func)
        if serve is None:
            return func(*args, **(kwargs or {}))
        self.calls += 1
        return serve(self.context, self.options, *args, **(kwargs or {}))

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
