"""A region's module is called once before training, to find attention that cannot run over a CP group."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_dcp.attention.options import DEFAULT, AttentionOptions
from lightning_dcp.attention.sdpa import ContextParallelAttention
from lightning_dcp.errors import UnsupportedAttentionError
from lightning_dcp.models.adapter import ModelAdapter
from lightning_dcp.models.compiled import COMPILED_CHILD, uncompiled
from lightning_dcp.models.layers import innermost_layer
from lightning_dcp.models.positions import POSITIONS, shaped_positions
from lightning_dcp.models.undisturbed import undisturbed
from lightning_dcp.parallel.context import CPContext, make_context
from lightning_dcp.parallel.groups import CPGroup

LENGTHS = (5, 7)
"""Tokens of the made-up samples. What only one of them shows is chance: five experts, say, make router scores of five
tokens look like attention scores."""
TOKENS, MASK, CACHE = "input_ids", "attention_mask", "use_cache"

_COMMUNICATING = {"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"}
_REMEDY = "change the call, or name a region that leaves this layer out"


@dataclass(frozen=True)
class Finding:
    """One call that cannot run over a CP group.

    Attributes:
        layer: path of the innermost layer inside the region; empty for the region itself.
        kind: the layer's class.
        function: what the layer called.
        found: what is wrong with the call.
        remedy: what to do.
    """

    layer: str
    kind: str
    function: str
    found: str
    remedy: str = _REMEDY


@dataclass(frozen=True)
class DryRun:
    """What a dry run gave.

    Attributes:
        findings: the calls that cannot run over a CP group.
        skipped: why there was no dry run to speak of; None if there was.
    """

    findings: tuple[Finding, ...] = ()
    skipped: str | None = None


def dry_run(
    module: nn.Module,
    options: AttentionOptions = DEFAULT,
    *,
    adapter: ModelAdapter | None = None,
    training: bool = True,
    forward_context: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> DryRun:
    """Call a region's module with a few made-up tokens, and collect every attention call that cannot run over a CP group.

    Nothing is sent to other ranks, and the module is left as it was (:func:`~.undisturbed.undisturbed`). What is found
    by one made-up sample is looked for again with another, so that a call which depends on the made-up values is left to
    the check at the first real call. ``module.forward`` is called and not ``module``, as by the regions.

    Args:
        module: the region's module, on its device.
        options: the run's; a kernel that cannot compute the layers' calls is found as well.
        adapter: how the module is called; by default as a plain module.
        training: leave layers in the mode they are in, as training does; else all are called in evaluation mode.
        forward_context: the precision plugin's context for a forward.
    """
    region, called = uncompiled(module), _Called.by(adapter)
    reason = _hindrance(region, called.positions)
    if reason is not None:
        return DryRun(skipped=reason)
    runs: list[tuple[Finding, ...]] = []
    for number, tokens in enumerate(LENGTHS):
        try:
            runs.append(_findings(region, called, tokens, number, options, training, forward_context))
        except UnsupportedAttentionError as error:  # raised by no function's call: a mask that is none is read, say
            return DryRun((_raised(region, error),))
        except (Exception, SystemExit) as error:  # the module's own, with inputs that it was not made for
            return DryRun(skipped=f"a call with {tokens} made-up tokens failed: {type(error).__name__}: {error}")
        if not runs[-1]:
            return DryRun()
    again = {(finding.layer, finding.function) for finding in runs[1]}
    return DryRun(tuple(finding for finding in runs[0] if (finding.layer, finding.function) in again))


@dataclass(frozen=True)
class _Called:
    """What a dry run needs of an adapter."""

    positions: str = POSITIONS
    all_ones: bool = False
    serving: Callable[[], AbstractContextManager[Any]] = nullcontext

    @classmethod
    def by(cls, adapter: ModelAdapter | None) -> _Called:
        return cls() if adapter is None else cls(adapter.positions, adapter.all_ones, adapter.serving)


def _findings(
    region: nn.Module,
    called: _Called,
    tokens: int,
    number: int,
    options: AttentionOptions,
    training: bool,
    forward_context: Callable[[], AbstractContextManager[Any]],
) -> tuple[Finding, ...]:
    device = _device(region)
    context = make_context(CPGroup(None, (0,)), 0, (tokens,), device=device)
    # On one rank nothing is exchanged, and a function that chooses the scheme may keep count of its choices.
    with undisturbed(region, device), forward_context(), called.serving():
        if not training:
            for layer in region.modules():
                layer.training = False
        args, kwargs = _arguments(region, called, context, _token(region, number))
        with CollectedProblems(region, context, replace(options, scheme="ring")) as collected:
            region.forward(*args, **kwargs)
    return tuple(dict.fromkeys(collected.findings))


def _raised(region: nn.Module, error: UnsupportedAttentionError) -> Finding:
    layer = innermost_layer(error, region)
    found, _, remedy = str(error).rpartition(". ")  # the last sentence says what to do
    kind = type(region.get_submodule(layer)).__name__
    return Finding(layer, kind, type(error).__name__, found or remedy, (found and remedy.rstrip(".")) or _REMEDY)


# ------------------------------------------------------------------ the call


def _hindrance(region: nn.Module, positions: str) -> str | None:
    """Why a module cannot be called with made-up tokens, or not without touching other ranks."""
    for name, tensor in chain(region.named_parameters(), region.named_buffers()):
        if is_lazy(tensor):
            return f"{name} gets its shape at the first call"
        if tensor.is_meta:
            return f"{name} is on the meta device"
        if hasattr(tensor, "device_mesh"):
            return f"{name} is spread over ranks"
    for name, layer in region.named_modules():
        if _COMMUNICATING & {kind.__name__ for kind in type(layer).__mro__}:
            return f"layer {name!r} ({type(layer).__name__}) communicates when it is called"
    parameters = _parameters(region)
    if _token_parameter(region, parameters, positions) is None:
        return f"{type(region).__name__}.forward has no argument for token ids"
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    others = [name for name in needed if name not in (_token_parameter(region, parameters, positions), positions, MASK)]
    return f"{type(region).__name__}.forward needs {', '.join(others)}" if others else None


def _parameters(region: nn.Module) -> Sequence[inspect.Parameter]:
    try:
        return tuple(inspect.signature(region.forward).parameters.values())
    except (TypeError, ValueError):  # a forward that is not written in Python
        return ()


def _token_parameter(region: nn.Module, parameters: Sequence[inspect.Parameter], positions: str) -> str | None:
    """``input_ids``, or else the first positional argument of a module that embeds tokens."""
    if any(p.name == TOKENS for p in parameters):
        return TOKENS
    first = next((p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)), None)
    embeds = any(isinstance(layer, nn.Embedding) for layer in region.modules())
    return first.name if first is not None and embeds and first.name != positions else None


def _arguments(
    region: nn.Module, called: _Called, context: CPContext, token: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Token ids and positions, as regions give them; no mask, as regions leave it out."""
    signature = inspect.signature(region.forward)
    parameters = tuple(signature.parameters.values())
    bound = signature.bind_partial()
    for parameter in parameters:
        if parameter.name == _token_parameter(region, parameters, called.positions):
            ids = torch.full((1, context.num_local_tokens), token, dtype=torch.int64, device=context.device)
            bound.arguments[parameter.name] = ids
        elif parameter.name == called.positions:
            bound.arguments[parameter.name] = shaped_positions(called.positions, context.positions)
        elif parameter.name == MASK:
            bound.arguments[parameter.name] = torch.ones_like(context.positions) if called.all_ones else None
        elif parameter.name == CACHE:
            bound.arguments[parameter.name] = False
    return bound.args, bound.kwargs


def _token(region: nn.Module, number: int) -> int:
    """An id that is no padding: the lowest, or the next one in the second run, if the smallest embedding has so many."""
    embeddings = [layer for layer in region.modules() if isinstance(layer, nn.Embedding)]
    padding = {layer.padding_idx for layer in embeddings}
    padding.add(getattr(getattr(region, "config", None), "pad_token_id", None))
    size = min((layer.num_embeddings for layer in embeddings), default=1)
    allowed = [token for token in range(min(size, 2 + len(padding))) if token not in padding] or [0]
    return allowed[number % len(allowed)]


def _device(region: nn.Module) -> torch.device:
    """Where token ids belong: with the embedding, or with the first weight."""
    tables: Iterable[Tensor] = (layer.weight for layer in region.modules() if isinstance(layer, nn.Embedding))
    return next((tensor.device for tensor in chain(tables, region.parameters())), torch.device("cpu"))


# ----------------------------------------------------------------- what is found


class CollectedProblems(ContextParallelAttention):
    """Serves attention as a region does, but notes what it would refuse, and lets that call go on as outside a region.

    Attributes:
        findings: every refused call, in order.
    """

    suspects_chance = True  # two runs with different numbers of tokens tell it from a router

    def __init__(self, region: nn.Module, context: CPContext, options: AttentionOptions) -> None:
        super().__init__(context, options)
        self._layers = {id(layer): (path, type(layer).__name__) for path, layer in region.named_modules()}
        self.findings: list[Finding] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Serve attention, or note why it cannot be served; pass every other function on."""
        try:
            return super().__torch_function__(func, types, args, kwargs)
        except UnsupportedAttentionError as error:
            found, _, remedy = str(error).rpartition(". ")  # the last sentence says what to do
            path, kind = self._calling_layer()
            name = str(getattr(func, "__name__", func))
            self.findings.append(Finding(path, kind, name, found or remedy, (found and remedy.rstrip(".")) or _REMEDY))
        try:
            return func(*args, **(kwargs or {}))
        except UnsupportedAttentionError:  # a call of this package's function that cannot be computed anywhere
            named = inspect.signature(func).bind(*args, **(kwargs or {})).arguments
            return named["query"].new_zeros((*named["query"].shape[:-1], named["value"].shape[-1]))

    def _calling_layer(self) -> tuple[str, str]:
        """Path and class of the innermost layer that is running: the first argument of some function being called."""
        frame = sys._getframe(1)
        while frame is not None:
            names = frame.f_code.co_varnames[: frame.f_code.co_argcount]
            layer = self._layers.get(id(frame.f_locals.get(names[0]))) if names else None
            if layer is not None:
                path, kind = layer
                return ".".join(part for part in path.split(".") if part != COMPILED_CHILD), kind
            frame = frame.f_back  # type: ignore[assignment]
        return self._layers[next(iter(self._layers))]
