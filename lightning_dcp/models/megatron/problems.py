"""What a TransformerConfig asks for that does not fit the layout, or does not run over CP groups: all of it at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any, TypeGuard

import torch

from lightning_dcp.errors import Problem
from lightning_dcp.models.megatron.moe_problems import moe_problems
from lightning_dcp.models.megatron.norm import KINDS
from lightning_dcp.models.megatron.not_run import NOT_RUN, WITH_TRANSFORMER_ENGINE
from lightning_dcp.models.megatron.recompute_problems import recompute_problems
from lightning_dcp.models.megatron.stages import stage_problems
from lightning_dcp.models.megatron.text_problems import meaning, text_problems
from lightning_dcp.parallel.topology import Topology

Fields = Mapping[str, Any]
"""Fields of a TransformerConfig by name; those that are not there have its defaults."""

_SPREAD = "spread model_parallel_fields(self.trainer.strategy) into the config, and set sizes in DCPStrategy alone"
_IMPORTED_VOCABULARY = (
    "a Hugging Face model brings its own: call model.resize_token_embeddings(pad_to_multiple_of={}) in transformers, and save "
    "it again"
)


def config_problems(
    fields: Fields,
    topology: Topology,
    *,
    transformer_engine: bool = False,
    vocab_size: int | None = None,
    built: bool = False,
) -> list[Problem]:
    """What is wrong with a model of these fields on this layout. Makes no config and needs no process groups.

    Args:
        fields: of the TransformerConfig.
        topology: the sizes in force.
        transformer_engine: whether layers are Transformer Engine's.
        vocab_size: rows of the embedding.
        built: whether these are the fields of a config that is made, and not only those that somebody gave.
    """
    written = list(text_problems(fields))
    fields = {name: value if (meant := meaning(value)) is None else meant for name, value in fields.items()}
    return [
        *written,
        *_missing(fields),
        *_layout_problems(fields, topology),
        *_split_problems(fields, topology, vocab_size),
        *stage_problems(fields, topology),
        *_schedule_problems(fields, topology),
        *_expert_problems(fields, topology),
        *recompute_problems(fields, transformer_engine=transformer_engine, built=built),
        *_not_run(fields, transformer_engine),
    ]


def _missing(fields: Fields) -> Iterator[Problem]:
    for name in ("num_layers", "hidden_size", "num_attention_heads"):
        value = fields.get(name)
        if not isinstance(value, int) or value < 1:
            yield Problem(f"{name}={value!r}", "not a positive whole number", f"give the TransformerConfig a {name}")


def _sizes(topology: Topology) -> dict[str, Any]:
    return {
        "tensor_model_parallel_size": topology.tensor_model_parallel_size,
        "pipeline_model_parallel_size": topology.pipeline_model_parallel_size,
        "virtual_pipeline_model_parallel_size": topology.virtual_pipeline_model_parallel_size,
        "expert_model_parallel_size": topology.expert_model_parallel_size,
        "expert_tensor_parallel_size": topology.expert_tensor_ranks,
        "sequence_parallel": topology.sequence_parallel,
    }


def _layout_problems(fields: Fields, topology: Topology) -> Iterator[Problem]:
    """Sizes of the config that are not the strategy's."""
    for name, value in _sizes(topology).items():
        own = fields.get(name, value)
        if own != value and not (own is None and name == "expert_tensor_parallel_size"):
            yield Problem(f"{name}={own!r} in the TransformerConfig", f"{value!r} in the strategy", _SPREAD)
    if fields.get("context_parallel_size", 1) != 1:
        asked = f"context_parallel_size={fields['context_parallel_size']} in the TransformerConfig"
        yield Problem(
            asked, "a CP group of its own for each micro-batch, which the strategy sets", "leave it out there"
        )


def _split_problems(fields: Fields, topology: Topology, vocab_size: int | None) -> Iterator[Problem]:
    """Dimensions that ranks cannot share equally."""
    hidden: Any = fields.get("hidden_size")
    heads: Any = fields.get("num_attention_heads")
    groups: Any = fields.get("num_query_groups") or heads
    tensor = {"num_attention_heads": heads, "num_query_groups": groups, "vocab_size": vocab_size}
    experts, expert = fields.get("num_moe_experts"), {}
    ffn = fields.get("ffn_hidden_size") or (4 * hidden if isinstance(hidden, int) else None)
    if not experts or fields.get("moe_layer_freq", 1) != 1:
        tensor["ffn_hidden_size"] = ffn
    if experts:
        tensor["moe_shared_expert_intermediate_size"] = fields.get("moe_shared_expert_intermediate_size")
        expert["moe_ffn_hidden_size"] = fields.get("moe_ffn_hidden_size") or ffn
    for values, name, size in (
        (tensor, "tensor_model_parallel_size", topology.tensor_model_parallel_size),
        (expert, "expert_tensor_parallel_size", topology.expert_tensor_ranks),
    ):
        for field, value in values.items():
            if isinstance(value, int) and value % size and not (field == "num_query_groups" and groups == heads):
                yield _no_multiple(field, value, name, size)
    hidden_is, heads_is, groups_is = (is_count(value) for value in (hidden, heads, groups))
    if hidden_is and heads_is and hidden % heads and not fields.get("kv_channels"):
        remedy = f"use a hidden_size of {-(-hidden // heads) * heads}, or give the size of a head as kv_channels"
        yield Problem(f"hidden_size={hidden}", f"num_attention_heads={heads}, which does not divide it", remedy)
    if heads_is and groups_is and heads % groups:
        remedy = f"use a num_query_groups that divides {heads}"
        yield Problem(f"num_query_groups={groups}", f"num_attention_heads={heads}, no multiple of it", remedy)


def is_count(value: Any) -> TypeGuard[int]:
    """Whether a value is a positive whole number."""
    return isinstance(value, int) and value > 0


def _no_multiple(field: str, value: int, name: str, size: int) -> Problem:
    smaller = next(n for n in range(size - 1, 0, -1) if value % n == 0)
    remedy = f"use a {field} that {size} divides ({-(-value // size) * size}, say), or {name}={smaller}"
    if field == "vocab_size":
        remedy += f"; {_IMPORTED_VOCABULARY.format(size)}"
    return Problem(f"{field}={value} with {name}={size}", f"a {field} that {size} does not divide", remedy)


def _schedule_problems(fields: Fields, topology: Topology) -> Iterator[Problem]:
    """What Megatron-Core's schedules and gradient sums need, and what would make them do our work twice."""
    if not fields.get("calculate_per_token_loss", True):
        found = "losses and gradients that Megatron-Core would scale, too; the strategy weighs micro-batches already"
        yield Problem("calculate_per_token_loss=False in the TransformerConfig", found, _SPREAD)
    if not topology.is_pipeline:
        return
    asked = f"pipeline_model_parallel_size={topology.pipeline_model_parallel_size}"
    if not fields.get("variable_seq_lengths", True):
        yield Problem(f"variable_seq_lengths=False with {asked}", "micro-batches of different lengths", _SPREAD)
    held = fields.get("params_dtype", torch.float32)
    if fields.get("pipeline_dtype", held) != held:
        found = f"params_dtype={held}, the dtype of what stages hand on"
        yield Problem(f"pipeline_dtype={fields['pipeline_dtype']} with {asked}", found, f"use pipeline_dtype={held}")
    if fields.get("fp32_residual_connection") and held != torch.float32:
        found = f"stages that would hand on float32 where the next ones take {held}"
        yield Problem(f"fp32_residual_connection=True with {asked}", found, "leave it out, or use one stage")
    if topology.virtual_pipeline_model_parallel_size is not None:
        yield from _interleaving_problems(fields, topology)
    elif fields.get("overlap_p2p_comm"):
        found = "Megatron-Core's plain 1F1B schedule, which has nothing to overlap transfers with"
        remedy = "leave it out, or set DCPStrategy(virtual_pipeline_model_parallel_size=...)"
        yield Problem(f"overlap_p2p_comm=True with {asked}", found, remedy)


def _interleaving_problems(fields: Fields, topology: Topology) -> Iterator[Problem]:
    asked = f"virtual_pipeline_model_parallel_size={topology.virtual_pipeline_model_parallel_size}"
    if not fields.get("overlap_p2p_comm", True) or fields.get("batch_p2p_comm", False):
        found = "batch_p2p_comm, which mixes up activations and gradients where the next stage is the one before, too"
        yield Problem(asked, found, f"use overlap_p2p_comm=True and batch_p2p_comm=False: {_SPREAD}")
    size, stages = fields.get("microbatch_group_size_per_vp_stage"), topology.pipeline_model_parallel_size
    if size not in (None, stages):
        found = f"plans whose number of micro-batches is a multiple of the {stages} stages"
        yield Problem(f"microbatch_group_size_per_vp_stage={size}", found, "leave it out")


def _expert_problems(fields: Fields, topology: Topology) -> Iterator[Problem]:
    experts, ranks = fields.get("num_moe_experts"), topology.expert_model_parallel_size
    if not experts and ranks > 1:
        remedy = "use expert_model_parallel_size=1, or a model with num_moe_experts"
        yield Problem(f"expert_model_parallel_size={ranks}", "a model without experts (num_moe_experts)", remedy)
    if topology.is_pipeline and ranks == 1 and fields.get("moe_token_dispatcher_type") == "allgather":
        asked = f"moe_token_dispatcher_type='allgather' with pipeline_model_parallel_size={topology.pipeline_model_parallel_size}"
        found = "variable_seq_lengths, which micro-batches need and that dispatcher refuses, of dense models, too"
        yield Problem(asked, found, "use moe_token_dispatcher_type='alltoall'")
    yield from moe_problems(SimpleNamespace(**{**fields, **_sizes(topology)}))


def _not_run(fields: Fields, transformer_engine: bool) -> Iterator[Problem]:
    norm = fields.get("normalization", "LayerNorm")
    if norm not in KINDS and not transformer_engine:
        yield Problem(f"normalization={norm!r}", "layers of torch's norms", f"use one of {list(KINDS)}")
    for name, (found, remedy) in NOT_RUN.items():
        if fields.get(name) not in (None, False, 0, "none"):
            yield Problem(f"{name}={_short(fields[name])}", found, remedy)
    for name in () if transformer_engine else WITH_TRANSFORMER_ENGINE:
        if fields.get(name):
            remedy = "leave it out, or use layers of Transformer Engine's (backend='transformer_engine', on a GPU)"
            yield Problem(
                f"{name}={_short(fields[name])}", "layers without Transformer Engine, which ignore it", remedy
            )


def _short(value: Any) -> str:
    text = getattr(value, "__name__", None) or repr(value)
    return text if len(text) < 60 else f"{text[:57]}..."
