"""Whether a model's layers can be dealt out to the stages and chunks of a pipeline."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lightning_dcp.errors import Problem
from lightning_dcp.parallel.topology import Topology

FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
_OWN = f"or give stages numbers of their own ({FIRST}, {LAST}, pipeline_model_parallel_layout)"


def stage_problems(fields: Mapping[str, Any], topology: Topology) -> Iterator[Problem]:
    """What is wrong with the number of layers, by the rules of ``get_num_layers_to_build`` in Megatron-Core.

    A ``pipeline_model_parallel_layout`` is Megatron-Core's to check.

    Args:
        fields: of the TransformerConfig.
        topology: the sizes in force.
    """
    yield from chunk_problems(topology.virtual_pipeline_model_parallel_size)
    layers = fields.get("num_layers")
    if not topology.is_pipeline or not isinstance(layers, int) or fields.get("pipeline_model_parallel_layout"):
        return
    own = {name: fields[name] for name in (FIRST, LAST) if fields.get(name) is not None}
    if own:
        yield from _uneven(layers, own, topology)
        return
    counted = {
        "the embedding": bool(fields.get("account_for_embedding_in_pipeline_split")),
        "the loss": bool(fields.get("account_for_loss_in_pipeline_split")),
    }
    extra = [name for name, is_counted in counted.items() if is_counted]
    total, parts = layers + len(extra), topology.pipeline_model_parallel_size * _chunks(topology)
    if total % parts:
        asked = " and ".join([f"num_layers={layers}", *(f"{name} as a layer" for name in extra)])
        fitting = [n - len(extra) for n in (total // parts * parts, -(-total // parts) * parts) if n > len(extra)]
        remedy = f"use num_layers={' or '.join(map(str, fitting))}, {_OWN}"
        yield Problem(f"{asked} on {_sizes(topology)}", f"{total} layers, which {parts} does not divide", remedy)


def chunk_problems(chunks: int | None) -> Iterator[Problem]:
    """What is wrong with the number of chunks of a stage, by which Megatron-Core tells a virtual pipeline from a plain one."""
    if chunks is not None and chunks < 2:
        found = "one chunk of layers on each stage, a pipeline that is not virtual"
        yield Problem(f"virtual_pipeline_model_parallel_size={chunks}", found, "use 2 or more, or leave it out")


def _uneven(layers: int, own: Mapping[str, int], topology: Topology) -> Iterator[Problem]:
    """Stages with numbers of their own; the others share what is left."""
    chunks = _chunks(topology)
    for name, number in own.items():
        if number < 1 or number % chunks:
            remedy = f"use a multiple of {chunks}" if chunks > 1 else "use 1 or more"
            yield Problem(f"{name}={number} on {_sizes(topology)}", f"{chunks} chunk(s) on each stage", remedy)
    left, stages = layers - sum(own.values()), topology.pipeline_model_parallel_size - len(own)
    if left == 0 if stages == 0 else left > 0 and left % (stages * chunks) == 0:
        return
    asked = f"num_layers={layers} with {', '.join(f'{name}={number}' for name, number in own.items())}"
    found = f"{left} layers for the {stages} stage(s) left, in {chunks} chunk(s) each"
    remedy = f"leave them a positive multiple of {stages * chunks}" if stages else f"use num_layers={sum(own.values())}"
    yield Problem(f"{asked} on {_sizes(topology)}", found, remedy)


def _chunks(topology: Topology) -> int:
    return topology.virtual_pipeline_model_parallel_size or 1


def _sizes(topology: Topology) -> str:
    chunks = topology.virtual_pipeline_model_parallel_size
    virtual = f" and virtual_pipeline_model_parallel_size={chunks}" if chunks else ""
    return f"pipeline_model_parallel_size={topology.pipeline_model_parallel_size}{virtual}"
