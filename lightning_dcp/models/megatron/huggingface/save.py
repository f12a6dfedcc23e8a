"""A model's weights into a Hugging Face folder, written by the ranks that hold them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_dcp.errors import Problem, raise_problems
from lightning_dcp.models.megatron.huggingface.config import HuggingFaceConfig, parse_config
from lightning_dcp.models.megatron.huggingface.describe import describe, differences
from lightning_dcp.models.megatron.huggingface.folder import INDEX, ShardWriter, require_safetensors
from lightning_dcp.models.megatron.huggingface.names import source_of
from lightning_dcp.models.megatron.model import MegatronModel
from lightning_dcp.models.megatron.weights import Weight, weights_of

_COMPANIONS = (  # what belongs to a model and is no weight
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt"),
    *("chat_template*", "generation_config.json"),
)


@torch.no_grad()
def save_huggingface(
    model: MegatronModel,
    path: str | Path,
    *,
    config: Mapping[str, Any] | None = None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5 * 10**9,
    companions: str | Path | None = None,
) -> None:
    """Write a folder that ``transformers.AutoModelForCausalLM.from_pretrained`` loads. Collective over the world.

    The weights of each pipeline stage and of each expert-parallel rank are written by one rank that holds them, gathered
    over tensor-parallel ranks one tensor at a time; so the folder must be one that all ranks see. ``config.json`` comes last.

    Args:
        model: the model, on any layout.
        path: the folder; made if need be.
        config: content of ``config.json``; by default that of the family that fits (:func:`.describe`).
        dtype: of the tensors in the folder; by default the model's own.
        max_shard_bytes: largest size of a file, in bytes.
        companions: a folder whose tokenizer and generation config are copied.

    Raises:
        ConfigurationError: on all ranks alike: the config does not say what the model computes, a weight has no place in the
            family, or there are weights in the folder already.
    """
    require_safetensors()
    content = dict(describe(model) if config is None else config)
    content["torch_dtype"] = str(dtype or model.config.params_dtype).removeprefix("torch.")
    said, folder, rank = parse_config(content), Path(path), dist.get_rank()
    _raise_on_all_ranks([*_unnamed(model, said), *(_folder_problems(folder) if rank == 0 else [])], model, said)
    folder.mkdir(parents=True, exist_ok=True)
    writer = ShardWriter(folder, rank, max_shard_bytes)
    for weight in weights_of(model):
        _write(weight, model, said, writer, dtype)
    writer.flush()
    every: list[list[dict[str, int]]] = [[]] * dist.get_world_size()
    dist.all_gather_object(every, writer.written)
    index = writer.publish(every)
    dist.barrier()
    if rank == 0:
        if companions is not None:
            _copy_companions(Path(companions), folder)
        if index is not None:
            (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
        (folder / "config.json").write_text(json.dumps(content, indent=2) + "\n")
    dist.barrier()


def _write(
    weight: Weight, model: MegatronModel, said: HuggingFaceConfig, writer: ShardWriter, dtype: torch.dtype | None
) -> None:
    """Gather a weight over the first of the ranks that hold it, and let the first of these write it."""
    from megatron.core import parallel_state

    source = source_of(weight.name, said.family)
    replica = (
        parallel_state.get_expert_data_parallel_rank()
        if weight.expert
        else parallel_state.get_data_parallel_rank(with_context_parallel=True)
    )
    if source is None or weight.copied or replica:
        return
    whole = weight.whole(weight.parameter)
    if weight.group.rank() == 0:
        tensors = source.split(whole, model.config.kv_channels, model.config.num_query_groups)
        for name, tensor in tensors.items():
            writer.add(name, tensor, dtype)


def _unnamed(model: MegatronModel, said: HuggingFaceConfig) -> list[Problem]:
    """Weights that the family has no name for."""
    names = [weight.name for weight in weights_of(model) if source_of(weight.name, said.family) is None]
    remedy = "save the run's checkpoint instead, or train a model of a family that has it"
    return [Problem(f"the weight {n}", f"nothing like it in a {said.family.architecture}", remedy) for n in names]


def _folder_problems(folder: Path) -> list[Problem]:
    there = sorted(file.name for file in folder.glob("model*.safetensors*"))
    if not there:
        return []
    return [
        Problem(
            f"weights in {str(folder)!r}", f"{', '.join(there)} there already", "choose another folder, or empty it"
        )
    ]


def _raise_on_all_ranks(own: list[Problem], model: MegatronModel, said: HuggingFaceConfig) -> None:
    every: list[list[Problem]] = [own] * dist.get_world_size()
    dist.all_gather_object(every, [*differences(model, said), *own])
    raise_problems(list(dict.fromkeys(problem for found in every for problem in found)))


def _copy_companions(source: Path, folder: Path) -> None:
    for pattern in _COMPANIONS:
        for file in sorted(source.glob(pattern)):
            if file.is_file():
                shutil.copyfile(file, folder / file.name)
