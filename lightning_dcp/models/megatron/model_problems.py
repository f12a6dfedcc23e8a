"""What stands against running a built Megatron-Core model as a region: its config, and layers that would ignore packs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import nn

from lightning_dcp.errors import Problem
from lightning_dcp.models.megatron import compat
from lightning_dcp.models.megatron.model import MegatronModel
from lightning_dcp.models.megatron.positions import position_problems, rotary_problems
from lightning_dcp.models.megatron.problems import config_problems
from lightning_dcp.parallel.topology import Topology

_OURS = "make the layers by lightning_dcp.models.megatron.layer_spec(config), or give this one an attribute `scope`"
_SELF_ATTENTION = "megatron.core.transformer.attention.SelfAttention"
_OTHER_ATTENTION = "megatron.core.transformer.multi_latent_attention.MultiLatentAttention"
_ROUTER = "megatron.core.transformer.moe.router.TopKRouter"

Finding = tuple[str, str, str]
"""Class of a layer, what is wrong with it, what to do."""


def model_problems(model: MegatronModel, name: str) -> Iterator[Problem]:
    """What is wrong with a model; on every rank its own chunks.

    A layer that has an attribute ``scope`` is taken to know packs: the model sets it.

    Args:
        model: the model.
        name: of the region.
    """
    strange = [
        chunk for chunk in model.chunks if not isinstance(chunk, compat.find("megatron.core.models.gpt.GPTModel"))
    ]
    for chunk in strange:
        remedy = "return the GPTModel itself from the provider, not wrapped in Float16Module or DistributedDataParallel"
        yield Problem(f"a {type(chunk).__name__} in MegatronModel", "no GPTModel of Megatron-Core", remedy)
    if strange:
        return
    chunk, config = model.chunk, model.config
    yield from config_problems(
        vars(config),
        topology_in_force(sequence_parallel=config.sequence_parallel),
        transformer_engine=_has_transformer_engine(model),
        vocab_size=chunk.vocab_size,
        built=True,
    )
    yield from position_problems(chunk.position_embedding_type, config)
    if chunk.position_embedding_type == "rope" and isinstance(config.kv_channels, int):
        yield from rotary_problems(f"kv_channels={config.kv_channels}", config.kv_channels, chunk.rotary_percent)
    places: dict[Finding, list[str]] = {}
    for path, layer in model.named_modules():
        for finding in _findings(layer):
            places.setdefault(finding, []).append(f"{name}.{path}" if name else path)
    for (kind, found, remedy), paths in places.items():
        more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
        yield Problem(f"layer {paths[0]!r} ({kind}){more} inside a context-parallel region", found, remedy)


def topology_in_force(*, sequence_parallel: bool) -> Topology:
    """The sizes of Megatron-Core's groups; whether it is sequence parallel is no matter of groups."""
    from megatron.core import parallel_state

    return Topology(
        dist.get_world_size(),
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
        virtual_pipeline_model_parallel_size=parallel_state.get_virtual_pipeline_model_parallel_world_size(),
        expert_model_parallel_size=parallel_state.get_expert_model_parallel_world_size(),
        expert_tensor_parallel_size=parallel_state.get_expert_tensor_parallel_world_size(),
        sequence_parallel=sequence_parallel,
    )


def _has_transformer_engine(model: nn.Module) -> bool:
    """Whether a layer is Transformer Engine's, or derives from one."""
    kinds = {kind for layer in model.modules() for kind in type(layer).__mro__}
    return any(kind.__module__.startswith("transformer_engine.") for kind in kinds)


def _findings(layer: nn.Module) -> Iterator[Finding]:
    """What is wrong with one layer."""
    if hasattr(layer, "core_attention"):
        yield from _attention_findings(layer)
    elif isinstance(attention := getattr(layer, "self_attention", None), nn.Module) and list(attention.parameters()):
        if not hasattr(attention, "core_attention") and not hasattr(attention, "scope"):
            yield (
                type(attention).__name__,
                "a layer that mixes tokens in its own way",
                "use layers with softmax attention",
            )
    elif isinstance(layer, compat.find(_ROUTER)) and not hasattr(layer, "scope"):
        yield type(layer).__name__, "a router whose statistics would depend on how a batch is cut into packs", _OURS
    elif hasattr(layer, "num_local_experts") and {"weight1", "weight2"} <= layer._parameters.keys():
        found = "all experts of a rank in one parameter, which no single expert can be saved from"
        yield type(layer).__name__, found, "use moe_grouped_gemm=False, or backend='transformer_engine'"


def _attention_findings(layer: Any) -> Iterator[Finding]:
    kind, core = type(layer).__name__, layer.core_attention
    if not isinstance(layer, compat.find(_SELF_ATTENTION)) or isinstance(layer, compat.find(_OTHER_ATTENTION)):
        yield kind, "attention of another kind than causal self-attention", "use grouped-query self-attention"
    elif not hasattr(core, "scope"):
        found = f"{type(core).__name__}, which knows nothing of packs: a sample would see its neighbours, and parts of itself"
        yield kind, found, _OURS
    elif layer.attn_mask_type.name not in ("causal", "padding_causal"):
        found = f"attn_mask_type={layer.attn_mask_type.name}: what runs over CP groups is causal"
        yield kind, found, "use AttnMaskType.causal"
