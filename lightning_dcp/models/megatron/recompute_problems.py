"""What a TransformerConfig may ask of activation recomputation that does nothing, or would compute on freed memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lightning_dcp.errors import Problem

_FILLED_IN = ["core_attn"]
"""What a TransformerConfig sets ``recompute_modules`` to where nobody does."""


def recompute_problems(fields: Mapping[str, Any], *, transformer_engine: bool, built: bool) -> Iterator[Problem]:
    """What is wrong with the modules to be computed again.

    Args:
        fields: of the TransformerConfig.
        transformer_engine: whether layers are Transformer Engine's.
        built: whether these are the fields of a config that is made, which says ``core_attn`` of itself.
    """
    modules = fields.get("recompute_modules")
    if not modules or (built and list(modules) == _FILLED_IN):
        return
    granularity = fields.get("recompute_granularity")
    if granularity != "selective" and not fields.get("moe_layer_recompute"):  # which makes it selective
        found = f"recompute_granularity={granularity!r}, with which the list does nothing"
        remedy = "use recompute_granularity='selective', or leave the list out"
        yield Problem(f"recompute_modules={modules}", found, remedy)
    elif not transformer_engine and "layernorm" in modules:
        found = "torch's norms, whose output Megatron-Core would free while it is still needed"
        remedy = "leave layernorm out of the list: core_attn, mlp and moe are computed again with any layers"
        yield Problem(f"recompute_modules={modules}", found, remedy)
