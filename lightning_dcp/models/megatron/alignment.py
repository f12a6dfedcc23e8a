"""The padding that a Megatron-Core model's back end needs."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from typing import Any

import torch.distributed as dist
from torch import nn

from lightning_dcp.models.adapter import ModelAdapter
from lightning_dcp.parallel.groups import ParallelGroups
from lightning_dcp.schedule.alignment import NO_ALIGNMENT, Alignment


def needed_alignment(config: Any, *, transformer_engine_attention: bool) -> Alignment:
    """What samples and packs must be multiples of.

    Args:
        config: the model's TransformerConfig. ``fp8`` asks for FP8, and ``fp4`` for FP4, whose blocks fit the same rule;
            ``sequence_parallel`` deals each rank's tokens out to ``tensor_model_parallel_size`` ranks.
        transformer_engine_attention: whether attention over a CP group is Transformer Engine's; ours takes samples of any
            length.
    """
    needed, tensor_parallel = NO_ALIGNMENT, int(config.tensor_model_parallel_size)
    if transformer_engine_attention:
        needed = needed.joined(Alignment.transformer_engine(tensor_parallel if config.sequence_parallel else 1))
    if getattr(config, "fp8", None) or getattr(config, "fp4", None):
        needed = needed.joined(Alignment.fp8(tensor_parallel))
    return needed


def has_transformer_engine_attention(model: nn.Module) -> bool:
    """Whether some layer's core attention is Transformer Engine's."""
    return any(getattr(layer, "needs_equal_chunks", False) for layer in model.modules())


def agreed_alignment(adapters: Iterable[ModelAdapter], groups: ParallelGroups) -> Alignment:
    """The padding that all regions of a module need together, on all stages of a pipeline. Collective over the world there.

    A stage without attention layers does not know what the others are made of, but all plan alike.

    Args:
        adapters: of this rank's regions.
        groups: the process groups.
    """
    needed = [adapter.alignment for adapter in adapters]
    if groups.pipeline is not None:
        every: list[Any] = [None] * dist.get_world_size(groups.control)
        dist.all_gather_object(every, reduce(Alignment.joined, needed, NO_ALIGNMENT), group=groups.control)
        needed = every
    return reduce(Alignment.joined, needed, NO_ALIGNMENT)
