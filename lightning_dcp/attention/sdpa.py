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
Functions = tuple[Callable[..., Any], ...]
_SOFTMAX: Functions = (
    *(F.softmax, torch.softmax, Tensor.softmax, F.softmin),
    *(F.log_softmax, torch.log_softmax, Tensor.log_softmax),
)
_ALONG_DIM: Functions = (
    *(torch.roll, Tensor.roll, torch.cumsum, Tensor.cumsum, Tensor.cumsum_, torch.cumprod, Tensor.cumprod),
    *(torch.cummax, Tensor.cummax, torch.cummin, Tensor.cummin, torch.logcumsumexp, Tensor.logcumsumexp),
)
_CONVOLUTIONS: Functions = (
    *(F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d),
    *(torch.conv1d, torch.conv2d, torch.conv3d, torch.conv_transpose1d, torch.conv_transpose2d),
)
_WATCHED = (*_BACKWARDS, *_ALONG_DIM, *_CONVOLUTIONS, F.multi_head_attention_forward, *_SERVED)
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


def _moves_along(
    tokens: int, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], *, flat: bool
) -> bool:
    """Whether a roll or a sum is along the tokens; the last dimension of more than two is features, however many.

    A tensor of one dimension may hold a number of each expert, of which there are as many as this rank happens to have
    tokens: only ``flat`` takes it for tokens.
    """
    x = args[0] if args else kwargs.get("input")
    name, place = ("dims", 2) if "roll" in func.__name__ else ("dim", 1)
    dims = kwargs.get(name, args[place] if len(args) > place else None)
    if not isinstance(x, Tensor) or dims is None or isinstance(dims, str):
        return True
    if x.dim() == 1 and not flat:
        return False
    along = [dim % max(1, x.dim()) for dim in (dims if isinstance(dims, Sequence) else [dims])]
    return not along or any(x.shape[dim] == tokens and (dim < x.dim() - 1 or x.dim() <= 2) for dim in along)


def _convolves(tokens: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a convolution reaches from token to token."""
    x, weight = (args[i] if len(args) > i else kwargs.get(name) for i, name in enumerate(("input", "weight")))
    if not isinstance(x, Tensor) or not isinstance(weight, Tensor):
        return True
    sizes = zip(x.shape[2 - weight.dim() :], weight.shape[2:], strict=True)
    return any(size == tokens and width > 1 for size, width in sizes)


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
        again: whether this is around a backward: then only attention of layers that checkpointing calls again is served,
            and nothing is refused that may as well be code outside the region.
        calls: how many attention calls it has served.
        suspects_chance: whether what may be chance is taken for tokens: a softmax over ``[1, T, T]``, a sum along ``[T]``.
    """

    suspects_chance = False

    def __init__(self, context: CPContext, options: AttentionOptions = DEFAULT, *, again: bool = False) -> None:
        super().__init__()
        self.again = again
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
        if not self.again and self._mixes_tokens(func, args, kwargs):
            raise UnsupportedAttentionError(
                f"{getattr(func, '__name__', func)} over tokens inside a context-parallel region, where a rank holds only "
                "a part of them. Attend by scaled_dot_product_attention, or keep this layer out of the region."
            )
        serve = _SERVED.get(func)
        if serve is None or (self.again and not self._is_of_region(args, kwargs)):
            return func(*args, **kwargs)
        self.calls += 1
        return serve(self.context, self.options, *args, **kwargs)

    def _mixes_tokens(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        tokens = self.context.num_region_tokens
        if func in _SOFTMAX:
            return _is_attention(tokens, args, kwargs, one_head=self.suspects_chance)
        if func in _ALONG_DIM:
            return _moves_along(tokens, func, args, kwargs, flat=self.suspects_chance)
        return func in _CONVOLUTIONS and _convolves(tokens, args, kwargs)

    def _is_of_region(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether attention in a backward is a region's: checkpointed layers beside it see other tokens."""
        query = args[0] if args else kwargs.get("query")
        return isinstance(query, Tensor) and query.dim() == 4 and query.shape[2] == self.context.num_region_tokens

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
