"""Attention over a CP group for models that call torch's function, or :func:`~lightning_dcp.attention.attention`."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._dynamo import decorators
from torch._ops import HigherOrderOperator
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from lightning_dcp.attention.functional import attention, serve_attention, serve_scaled_dot_product_attention
from lightning_dcp.attention.options import DEFAULT, AttentionOptions
from lightning_dcp.errors import UnsupportedAttentionError
from lightning_dcp.parallel.context import CPContext

_BACKWARDS = (Tensor.backward, torch.autograd.backward)
_SERVED: dict[Callable[..., Any], Callable[..., Tensor]] = {
    F.scaled_dot_product_attention: serve_scaled_dot_product_attention,
    attention: serve_attention,
}
_SOFTMAX = (F.softmax, torch.softmax, Tensor.softmax)
_MIXING = (F.conv1d, F.conv2d, torch.conv1d, torch.conv2d, torch.roll, Tensor.roll, torch.cumsum, Tensor.cumsum)
"""Functions that mix neighbouring tokens, and those by which attention is written by hand."""
_WATCHED = (*_BACKWARDS, *_MIXING, F.multi_head_attention_forward, *_SERVED)
"""Functions that are not simply passed on. Tuples, because older dynamos cannot look a function up in a set."""


FLEX = "flex_attention"
"""torch's operator of attention by a function of the user's, which would see local tokens."""


def flex_refusal() -> str:
    """Why it cannot run, and what to do."""
    return (
        "flex_attention inside a context-parallel region: its mask and score functions would see the tokens of one rank. "
        "Call lightning_dcp.attention.attention, which has windows, soft-cap and sinks, or keep this layer out of the region."
    )


def _square(args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> bool:
    """Whether a softmax is over square scores; asked of shapes alone, so that a compiled graph can hold the answer."""
    scores = args[0] if args else (kwargs or {}).get("input")
    return isinstance(scores, Tensor) and scores.dim() > 2 and scores.shape[-1] == scores.shape[-2]


def _is_attention(tokens: int, args: Sequence[Any], kwargs: Mapping[str, Any], *, one_head: bool) -> bool:
    """Whether a softmax is over square scores of the local tokens: attention by hand.

    ``[1, T, T]`` may be one head's scores, or those of a router that has as many experts as this rank happens to have
    tokens: only ``one_head`` counts it as attention.
    """
    scores = args[0] if args else kwargs.get("input")
    if scores is None or not _square(args, kwargs) or scores.shape[-1] != tokens:
        return False
    return tokens > 1 and (one_head or scores.dim() > 3 or scores.shape[0] > 1)


class ContextParallelAttention(TorchFunctionMode):
    """While active, ``scaled_dot_product_attention`` and :func:`attention` run over the CP group of one context.

    Entered around a region's forward and around the backward, where activation checkpointing calls the model's layers
    again. The mode belongs to the thread (autograd hands it on to its own threads), the context to the mode: there is
    no global "current group".

    Under ``torch.compile`` dynamo traces :meth:`__torch_function__` into its graphs, for every function that the model
    calls. So it decides by the function and by shapes alone, never by the context, which is another one for each pack:
    graphs stay valid for all packs. What needs the context is a graph break (:func:`run_outside_graphs`).

    Attributes:
        context: the pack whose attention this is.
        options: how it is computed.
        calls: how many attention calls it has served.
        suspects_one_head: whether a softmax over ``[1, T, T]`` is taken for attention by hand.
    """

    suspects_one_head = False

    def __init__(self, context: CPContext, options: AttentionOptions = DEFAULT) -> None:
        super().__init__()
        self.context, self.options = context, options
        self.calls = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Serve attention; pass every other function on."""
        if func in _WATCHED or (func in _SOFTMAX and _square(args, kwargs)):
            return run_outside_graphs(self, func, args, kwargs or {})
        if isinstance(func, HigherOrderOperator):
            # Dynamo's form of checkpointing, conditions, ...: it would trace their bodies without this mode, and
            # attention in there would run over the local tokens alone. Left to eager code, bodies see the mode.
            return run_outside_graphs(self, func, args, kwargs or {})
        if func is Tensor.unflatten:  # dynamo cannot trace what this method calls, but it can trace the method call
            return args[0].unflatten(*args[1:], **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _serve(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if func in _BACKWARDS and kwargs.get("inputs") is None:
            return self._backward(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            raise UnsupportedAttentionError(
                "multi_head_attention_forward inside a context-parallel region: its attention cannot run over a CP "
                "group. Call scaled_dot_product_attention instead, or keep this layer out of the region."
            )
        if isinstance(func, HigherOrderOperator) and func.name().startswith(FLEX):
            raise UnsupportedAttentionError(flex_refusal())
        if func in _MIXING or (
            func in _SOFTMAX
            and _is_attention(self.context.num_local_tokens, args, kwargs, one_head=self.suspects_one_head)
        ):
            raise UnsupportedAttentionError(
                f"{getattr(func, '__name__', func)} over tokens inside a context-parallel region, where a rank holds only "
                "a part of them. Attend by scaled_dot_product_attention, or keep this layer out of the region."
            )
        serve = _SERVED.get(func)
        if serve is None:
            return func(*args, **kwargs)
        self.calls += 1
        return serve(self.context, self.options, *args, **kwargs)

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


@torch.compiler.disable
def run_outside_graphs(
    mode: ContextParallelAttention, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Serve a function with what the mode knows of its pack; a graph break wherever dynamo meets it."""
    return mode._serve(func, args, kwargs)


def _never_compiled_alone(code: types.CodeType) -> None:
    """Let dynamo trace a function into the graphs of its callers, but not compile it where its caller runs eagerly.

    Else ``__torch_function__`` would be compiled once for each function called in eager code, up to dynamo's limit.
    Being skipped belongs to the code; another function with that code takes the mark that would forbid tracing too.
    """
    skip = getattr(decorators, "skip", None)  # not a public name; without it compiling only takes longer
    if skip is not None:
        skip(types.FunctionType(code, globals()))


_never_compiled_alone(ContextParallelAttention.__torch_function__.__code__)
