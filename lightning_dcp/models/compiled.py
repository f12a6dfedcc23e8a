"""Regions under ``torch.compile``: which module is compiled, and what compiled code cannot hold."""

from __future__ import annotations

from torch import nn
from torch._dynamo import OptimizedModule
from torch._dynamo.exc import Unsupported

from lightning_dcp.attention.sdpa import FLEX, flex_refusal, run_outside_graphs
from lightning_dcp.errors import RegionError, UnsupportedAttentionError

COMPILED_CHILD = "_orig_mod"
"""Where ``torch.compile(module)`` keeps the module."""


def uncompiled(module: nn.Module) -> nn.Module:
    """The module inside ``torch.compile(module)``, or the module itself."""
    while isinstance(module, OptimizedModule):
        module = getattr(module, COMPILED_CHILD)
    return module


def compiled_in_place(module: nn.Module) -> bool:
    """Whether ``module.compile()`` was called."""
    return not isinstance(module, OptimizedModule) and module._compiled_call_impl is not None


def is_compiled(module: nn.Module) -> bool:
    """Whether a module's call is compiled, by ``torch.compile(module)`` or ``module.compile()``."""
    return isinstance(module, OptimizedModule) or compiled_in_place(module)


def refuse_inside_compiled(root: nn.Module, name: str) -> None:
    """Compiled code stops at a region, so inside a compiled module a region would run uncompiled without a word."""
    parts = name.split(".") if name else []
    for outer in (".".join(parts[:n]) for n in range(len(parts))):
        if is_compiled(root.get_submodule(outer)):
            raise RegionError(
                f"region {name!r} lies inside {outer or 'the LightningModule'!r}, which is compiled as a whole; its code "
                f"stops at the region. Name the compiled module as the region, or compile {name!r} itself (or layers in "
                f"it) instead of {outer or 'the LightningModule'!r}."
            )


def refuse_unbroken_graph(name: str, error: Unsupported) -> None:
    """Say it plainly when dynamo was forbidden to break a graph where a function needs the pack.

    Raises:
        RegionError: the graph would have to break there; for other reasons nothing is raised.
        UnsupportedAttentionError: torch's ``flex_attention``, which compiles itself in this way.
    """
    if run_outside_graphs.__name__ in str(error) and FLEX in str(error):  # it compiles itself, as one graph
        raise UnsupportedAttentionError(flex_refusal()) from error
    if run_outside_graphs.__name__ in str(error):
        raise RegionError(
            f"region {name!r}: a part of it is compiled with fullgraph=True, but attention runs over the ranks of a CP group "
            "and checkpointed layers call it again in the backward; neither fits into one graph. Compile without "
            "fullgraph=True, or with it only layers without attention and checkpointing, such as feed-forwards."
        ) from error
