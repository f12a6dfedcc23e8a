"""Telling Hugging Face models from others, without importing their package for modules that have nothing to do with it."""

from __future__ import annotations

import sys

from torch import nn

from lightning_dcp.models.adapter import ModelAdapter
from lightning_dcp.models.compiled import uncompiled

_PER_TOKEN_HEADS = ("ForCausalLM", "LMHeadModel")
"""Classes whose whole forward gives one output a token; other heads pool tokens, or compare them."""


def is_transformer(module: nn.Module) -> bool:
    """Whether a module is a Hugging Face model."""
    package = sys.modules.get("transformers.modeling_utils")
    return package is not None and isinstance(module, package.PreTrainedModel)


def transformer_region(name: str, module: nn.Module) -> tuple[str, nn.Module]:
    """The part of a Hugging Face model that can be a region, with its path.

    That is the whole of a causal language model and of a model without a head. Of others, such as sequence and token
    classifiers, it is the model below the head, which then sees whole samples.
    """
    model = uncompiled(module)
    prefix = getattr(model, "base_model_prefix", "")
    below = getattr(model, prefix, None) if prefix else None
    if type(model).__name__.endswith(_PER_TOKEN_HEADS) or not isinstance(below, nn.Module):
        return name, module
    return f"{name}.{prefix}" if name else prefix, below


def transformer_adapter(module: nn.Module, *, fused: bool) -> ModelAdapter:
    """The adapter of a Hugging Face model.

    Args:
        module: the model, compiled or not.
        fused: whether its loss is computed without logits.
    """
    from lightning_dcp.models.huggingface.adapter import TransformerAdapter

    return TransformerAdapter(module, fused=fused)
