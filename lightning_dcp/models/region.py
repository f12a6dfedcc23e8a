"""Regions: modules whose call is sharded on entry and gathered on exit, so that callers see whole samples."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.exc import Unsupported
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from lightning_dcp.attention.options import DEFAULT, AttentionOptions
from lightning_dcp.attention.sdpa import ContextParallelAttention
from lightning_dcp.batch.view import BatchView
from lightning_dcp.errors import PlanError, RegionError, UnsupportedAttentionError
from lightning_dcp.models.compiled import (
    COMPILED_CHILD,
    compiled_in_place,
    is_compiled,
    refuse_inside_compiled,
    refuse_unbroken_graph,
    uncompiled,
)
from lightning_dcp.parallel.context import CPContext
from lightning_dcp.parallel.randomness import seed_of, seeded
from lightning_dcp.parallel.shard import gather, shard

POSITIONS = "position_ids"
"""The argument through which a region's module is told where each token lies in its own sample."""


@dataclass(frozen=True)
class ActivePack:
    """The pack that regions work on while the user's step runs.

    Attributes:
        view: the user's batch, cut down to this pack's samples.
        context: group and layout of the pack.
        max_tokens: the most tokens that a rank may hold.
        seed: of the random numbers drawn inside regions, another one on each rank, as ranks hold different tokens.
        attention: how attention is computed.
    """

    view: BatchView
    context: CPContext
    max_tokens: int
    seed: int = 0
    attention: AttentionOptions = DEFAULT


class Regions:
    """The regions of one LightningModule.

    A region may be compiled (``torch.compile(module)`` or ``module.compile()``), and so may layers inside it. Sharding
    and gathering happen outside the compiled code, which sees this rank's tokens; hooks on a compiled module are part
    of that code.

    Args:
        modules: the modules by name.
        compiler: compiles a forward, where the LightningModule is compiled as a whole; regions are cut out of its steps,
            so they are compiled by themselves.
    """

    def __init__(self, modules: Mapping[str, nn.Module], compiler: Callable[..., Any] | None = None) -> None:
        self.modules = dict(modules)
        self.calls = 0
        self._compiler = compiler
        self._replaced: dict[str, tuple[str, Any]] = {}
        self._pack: ActivePack | None = None

    def install(self) -> None:
        """Put each module's ``forward`` behind the wrapper; outside a step it passes calls straight through."""
        for name, module in self.modules.items():
            signature = inspect.signature(uncompiled(module).forward)
            entry = "_compiled_call_impl" if compiled_in_place(module) else "forward"
            forward = getattr(module, entry)
            if self._compiler is not None and name and not is_compiled(module):
                forward = self._compiler(forward)
            self._replaced[name] = (entry, vars(module).get(entry))
            setattr(module, entry, partial(self._call, name, signature, forward))

    def remove(self) -> None:
        """Undo :meth:`install`."""
        for name, (entry, own) in self._replaced.items():
            vars(self.modules[name]).pop(entry)
            if own is not None:
                setattr(self.modules[name], entry, own)
        self._replaced.clear()

    @contextmanager
    def active(self, pack: ActivePack) -> Iterator[None]:
        """Regions called inside work on this pack."""
        before, self._pack = self._pack, pack
        try:
            yield
        finally:
            self._pack = before

    @contextmanager
    def backward_of(self, pack: ActivePack) -> Iterator[None]:
        """As :meth:`active`, for a backward: layers that checkpointing calls again find the pack's attention."""
        with self.active(pack), ContextParallelAttention(pack.context, pack.attention, again=True):
            yield

    @torch.compiler.disable  # where a compiled step calls a region; the region's own compiled code is not concerned
    def _call(
        self, name: str, signature: inspect.Signature, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        pack = self._pack
        if pack is None:
            return forward(*args, **kwargs)
        if pack.context.num_local_tokens > pack.max_tokens:
            raise PlanError(
                f"{pack.context.num_local_tokens} tokens of a micro-batch on one rank; the limit is {pack.max_tokens}"
            )
        args, kwargs = _shard_arguments(name, signature, args, kwargs, pack)
        self._pack = None  # a region inside this one sees local tokens already
        try:
            seed = seed_of(pack.seed, self.calls)
            with ContextParallelAttention(pack.context, pack.attention), seeded(seed, pack.context.device):
                out = forward(*args, **kwargs)
        except Unsupported as error:
            refuse_unbroken_graph(name, error)
            raise
        except UnsupportedAttentionError as error:
            raise UnsupportedAttentionError(f"{_layer_of(error, self.modules[name], name)}: {error}") from error
        finally:
            self._pack = pack
            self.calls += 1
        return pytree.tree_map_with_path(partial(_gather_output, name, pack), out)


def _layer_of(error: BaseException, region: nn.Module, name: str) -> str:
    """The innermost module whose code an error came through, by its path."""
    paths = {id(module): path for path, module in region.named_modules()}
    traceback, found = error.__traceback__, ""
    while traceback is not None:
        found = paths.get(id(traceback.tb_frame.f_locals.get("self")), found)
        traceback = traceback.tb_next
    parts = [part for part in (name, *found.split(".")) if part and part != COMPILED_CHILD]
    return f"layer {'.'.join(parts)!r}"


def _shard_arguments(
    name: str, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any], pack: ActivePack
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Shard per-token arguments, leave the mask out, and add the positions if the caller gave none."""
    bound = signature.bind(*args, **kwargs)
    if "attention_mask" in bound.arguments:
        # Sample borders come from the plan; a mask, all ones or not, must not change them.
        bound.arguments["attention_mask"] = None
    for argument, value in bound.arguments.items():
        bound.arguments[argument] = pytree.tree_map(partial(_shard_argument, name, argument, pack), value)
    if bound.arguments.get(POSITIONS) is None:
        bound.arguments[POSITIONS] = F.pad(pack.context.positions, (0, pack.context.num_fill_tokens))
    return bound.args, bound.kwargs


def _shard_argument(name: str, argument: str, pack: ActivePack, value: Any) -> Any:
    if not isinstance(value, Tensor) or value.dim() == 0:
        return value
    if pack.view.per_token(value):
        whole = pack.view.flatten(value)
        return _filled(shard(whole, pack.context), whole, pack.context).unsqueeze(0)
    raise RegionError(
        f"region {name!r} was called with a tensor of shape {_shape(value)} (argument {argument!r}); its tensors "
        f"must be per-token, {pack.view.shape_name} for this micro-batch, or scalars. Pass whole samples and shift labels "
        "afterwards (not input_ids[:, :-1]), and keep per-sample tensors out of the region."
    )


def _filled(local: Tensor, whole: Tensor, context: CPContext) -> Tensor:
    """This rank's tokens with fill tokens behind them, which are copies of the pack's first: any valid one will do."""
    if not context.num_fill_tokens:
        return local
    first = whole[:1].detach()
    return torch.cat([local, first.expand(context.num_fill_tokens, *first.shape[1:])])


def _gather_output(name: str, pack: ActivePack, path: pytree.KeyPath, value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    local = (1, pack.context.num_region_tokens)
    if tuple(value.shape[:2]) == local:
        return pack.view.unflatten(gather(value[0, : pack.context.num_local_tokens], pack.context))
    raise RegionError(
        f"region {name!r} returned a tensor of shape {_shape(value)} at {pytree.keystr(path) or 'the top'}; it must be "
        f"per-token, {list(local)} and more on this rank, to be gathered. Reduce over tokens outside the region."
    )


def _shape(value: Tensor) -> list[Any]:
    return list(value.shape)


def takes_positions(module: nn.Module) -> bool:
    """Whether a module's forward can be told the position of each token."""
    return POSITIONS in inspect.signature(uncompiled(module).forward).parameters


def find_regions(root: nn.Module, names: list[str] | None, *, forward_overridden: bool) -> Regions:
    """The regions of a LightningModule: those named, or the only one that can be.

    Without names it is the module's own ``forward`` if that takes ``position_ids``, or else the one child module whose
    forward does.

    Args:
        root: the LightningModule.
        names: attribute paths, such as ``["policy", "reference"]``; ``""`` is the module itself.
        forward_overridden: whether the module defines ``forward``.

    Raises:
        RegionError: nothing or more than one thing found (the candidates are listed), a name that is none, or a region
            inside a compiled module.
    """
    modules = _find(root, names, forward_overridden)
    for name in modules:
        refuse_inside_compiled(root, name)
    # Lightning's from_compiled: trainer.fit(torch.compile(module)) compiles the steps and forward of the module
    compiler = getattr(root, "_compiler_ctx", None)
    return Regions(modules, compiler["dynamo_ctx"] if compiler else None)


def _find(root: nn.Module, names: list[str] | None, forward_overridden: bool) -> dict[str, nn.Module]:
    if names is not None:
        return {name: _named(root, name) for name in names}
    if forward_overridden and takes_positions(root):
        return {"": root}
    candidates = {name: child for name, child in root.named_children() if any(True for _ in child.parameters())}
    eligible = {name: child for name, child in candidates.items() if takes_positions(child)}
    if len(eligible) == 1:
        return eligible
    raise RegionError(_not_found(type(root).__name__, candidates, list(eligible)))


def _named(root: nn.Module, name: str) -> nn.Module:
    try:
        module = root.get_submodule(name)
    except AttributeError as error:
        paths = [path for path, _ in root.named_modules() if path.count(".") < 2]
        raise RegionError(f"regions: {type(root).__name__} has no module {name!r}; it has {paths}") from error
    if not takes_positions(module):
        raise RegionError(
            f"region {name!r}: {type(uncompiled(module)).__name__}.forward has no parameter {POSITIONS!r}. A shard does not "
            f"start at position 0, so the model must be told where each token lies: add `{POSITIONS}=None` ([1, T]) to "
            "forward and use it for rotary or learned positions (or accept and ignore it if the model has none)."
        )
    return module


def _not_found(root: str, candidates: Mapping[str, nn.Module], eligible: list[str]) -> str:
    listed = "; ".join(
        f"{name!r} ({type(uncompiled(child)).__name__}, {'can be one' if name in eligible else f'forward has no {POSITIONS}'})"
        for name, child in candidates.items()
    )
    problem = "more than one module could be the context-parallel region" if eligible else "no context-parallel region"
    return (
        f"{problem} of {root}. Candidates: {listed or 'none (no child module has parameters)'}. Name it: "
        f"DCPStrategy(regions=[...]); its forward must take {POSITIONS}=None, the position of each token ([1, T])."
    )
