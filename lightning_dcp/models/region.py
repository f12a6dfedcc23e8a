"""Regions: modules whose call is sharded on entry and gathered on exit, so that callers see whole samples."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.exc import Unsupported
from torch.autograd.graph import GradientEdge

from lightning_dcp.attention.sdpa import ContextParallelAttention
from lightning_dcp.errors import BatchError, UnsupportedAttentionError
from lightning_dcp.models.adapter import ModelAdapter
from lightning_dcp.models.call import RegionCall
from lightning_dcp.models.compiled import (
    compiled_in_place,
    is_compiled,
    refuse_unbroken_graph,
    uncompiled,
)
from lightning_dcp.models.layers import full_name, innermost_layer
from lightning_dcp.models.pack import ActivePack
from lightning_dcp.parallel.context import CPContext
from lightning_dcp.parallel.randomness import seed_of


class Regions:
    """The regions of one LightningModule.

    A region may be compiled (``torch.compile(module)`` or ``module.compile()``), and so may layers inside it. Sharding
    and gathering happen outside the compiled code, which sees this rank's tokens; hooks on a compiled module are part
    of that code.

    Args:
        modules: the modules by name.
        compiler: compiles a forward, where the LightningModule is compiled as a whole; regions are cut out of its steps,
            so they are compiled by themselves.
        adapt: makes a module's adapter.

    Attributes:
        modules: the modules by name.
        adapters: how each is called.
        calls: calls of all regions so far.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        compiler: Callable[..., Any] | None = None,
        adapt: Callable[[nn.Module], ModelAdapter] = ModelAdapter,
    ) -> None:
        self.modules = dict(modules)
        self.adapters = {name: adapt(module) for name, module in self.modules.items()}
        self.calls = 0
        self._compiler = compiler
        self._replaced: dict[str, tuple[str, Any]] = {}
        self._pack: ActivePack | None = None
        self._again: ContextParallelAttention | None = None

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
        """For a backward: layers that checkpointing calls again find the attention of the call that they belong to."""
        before, self._pack = self._pack, pack
        self._again = ContextParallelAttention(pack.context, pack.attention, again=True)
        try:
            with ExitStack() as stack:
                for adapter in self.adapters.values():
                    stack.enter_context(adapter.serving())
                stack.enter_context(self._again)
                yield
        finally:
            self._pack, self._again = before, None

    @torch.compiler.disable  # where a compiled step calls a region; the region's own compiled code is not concerned
    def _call(
        self, name: str, signature: inspect.Signature, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        pack = self._pack
        if pack is None:
            return forward(*args, **kwargs)
        adapter = self.adapters[name]
        bound = signature.bind(*args, **kwargs)
        # Drawn from the step's own stream, the same on all ranks of the group: checkpointing of the user's around a region
        # puts the stream back, so that the call draws the same again.
        seed = seed_of(pack.seed, int(torch.randint(2**62, ())))
        call = RegionCall(
            name, pack, forward, bound, adapter.positions, seed, self._mark, first_position=adapter.first_position
        )
        self._pack = None  # a region inside this one sees local tokens already
        try:
            with adapter.serving():
                out = adapter.call(call)
        except Unsupported as error:
            refuse_unbroken_graph(name, error)
            raise
        except UnsupportedAttentionError as error:
            layer = full_name(name, innermost_layer(error, self.modules[name]))
            raise UnsupportedAttentionError(f"layer {layer!r}: {error}") from error
        finally:
            self._pack = pack
            self.calls += 1
        return out

    def _mark(self, out: Tensor, context: CPContext) -> Tensor:
        return _BackwardEnters.apply(out, self, context) if out.requires_grad else out

    def backward_enters(self, context: CPContext) -> None:
        """A backward has come to the part of the graph that a call of this context made."""
        if self._again is not None:
            self._again.context = context


class _BackwardEnters(torch.autograd.Function):
    """The identity; its backward tells the regions whose call's nodes come next.

    Calls of one step may be about different sequences, and layers that checkpointing calls again must attend within
    theirs. Autograd runs what was made last first, so all nodes of later calls are done when the mark of an earlier one is
    reached.
    """

    @staticmethod
    def forward(ctx: Any, out: Tensor, regions: Regions, context: CPContext) -> Tensor:
        ctx.regions, ctx.context = regions, context
        ctx.shape, ctx.options = out.shape, {"dtype": out.dtype, "device": out.device}
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        ctx.regions.backward_enters(ctx.context)
        return grads[0], None, None


def backward_of_nothing(loss: Tensor) -> None:
    """Go through the regions' part of a loss's backward with gradients of zero, and through nothing else.

    A rank whose tokens are no targets has nothing to add, and a loss that is a mean over nothing; but the others of its group
    meet it inside the regions' backward.

    Raises:
        BatchError: a loss without a graph.
    """
    if loss.grad_fn is None:
        raise BatchError(
            "training_step returned a constant for tokens without targets, but the other ranks of the group wait for its "
            "backward: return a loss that depends on the model's output, such as `0 * logits.sum()`"
        )
    marks = region_marks(loss)
    if marks:
        zeros = [torch.zeros(node.shape, **node.options) for node in marks]
        torch.autograd.backward([GradientEdge(node, 0) for node in marks], zeros)


def region_marks(loss: Tensor) -> list[Any]:
    """The nodes of a loss's graph where the regions' part begins; none if it does not depend on their outputs."""
    marks: list[Any] = []
    seen: set[Any] = set()
    waiting: list[Any] = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, _BackwardEnters._backward_cls):
            marks.append(node)
        else:
            waiting += [function for function, _ in node.next_functions]
    return marks
