"""Biases of attention's output projections alone: Megatron-Core's ``add_bias_linear`` gives MLPs theirs, too."""

from __future__ import annotations

from functools import cache
from typing import Any


def with_output_bias(spec: Any) -> Any:
    """Give the output projections of a block's attention layers a bias, as Llama models with ``attention_bias`` have it.

    Args:
        spec: of :func:`~lightning_dcp.models.megatron.layer_spec`; changed and returned.
    """
    for layer in spec.layer_specs:
        parts = layer.submodules.self_attention.submodules
        parts.linear_proj = _biased(parts.linear_proj)
    return spec


@cache
def _biased(linear: type) -> type:
    class Biased(linear):
        """A row-parallel linear layer with a bias, whatever is asked."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **(kwargs | {"bias": True}))

    Biased.__name__ = Biased.__qualname__ = f"Biased{linear.__name__}"
    return Biased
