"""Layers that mix tokens by other means than attention that regions serve: a rank holds only a part of the tokens."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from lightning_dcp.errors import Problem
from lightning_dcp.models.compiled import COMPILED_CHILD

_OF_TORCH = (
    nn.RNNBase,
    nn.RNNCellBase,
    nn.modules.conv._ConvNd,
    nn.modules.batchnorm._NormBase,
    nn.MultiheadAttention,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
)


def mixing_layers(module: nn.Module, mixes: Callable[[nn.Module], bool] = lambda layer: False) -> dict[str, nn.Module]:
    """Layers of a module that mix tokens, the outermost ones, by path.

    Args:
        module: a region's module.
        mixes: says it of layers that are none of torch's.
    """
    found: dict[str, nn.Module] = {}
    for path, layer in module.named_modules():
        name = ".".join(part for part in path.split(".") if part != COMPILED_CHILD)
        if (isinstance(layer, _OF_TORCH) or mixes(layer)) and not lies_in(name, found):
            found[name] = layer
    return found


def lies_in(path: str, layers: dict[str, nn.Module] | set[str]) -> bool:
    """Whether a path is one of these layers, or inside one."""
    return any(path == layer or path.startswith(f"{layer}.") for layer in layers)


def mixing_problem(name: str, layer: nn.Module) -> Problem:
    """Why a layer cannot be inside a region."""
    return Problem(
        f"layer {name!r} ({type(layer).__name__}) inside a context-parallel region",
        "a layer that mixes tokens, of which a rank holds only a part",
        "use scaled_dot_product_attention instead, or name a region that leaves this layer out",
    )
