"""A model's weights into a Hugging Face folder, written by the ranks that hold them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dcp.errors import CheckpointError, Problem, raise_problems
from lightning_dcp.models.megatron.huggingface.config import HuggingFaceConfig, parse_config
from lightning_dcp.models.megatron.huggingface.describe import describe, differences
from lightning_dcp.models.megatron.huggingface.folder import INDEX, ShardWriter, index_of, require_safetensors
from lightning_dcp.models.megatron.huggingface.names import source_of
from lightning_dcp.models.megatron.model import MegatronModel
from lightning_dcp.models.megatron.scalar_head import ScalarHead
from lightning_dcp.models.megatron.weights import weights_of

_T = TypeVar("_T")

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
        CheckpointError: on all ranks alike: a rank cannot write. What was written is deleted.
    """
    require_safetensors()
    content = dict(describe(model) if config is None else config)
    content["torch_dtype"] = str(dtype or model.config.params_dtype).removeprefix("torch.")
    said, folder, rank = parse_config(content), Path(path), dist.get_rank()
    _raise_on_all_ranks([*_unnamed(model, said), *(_folder_problems(folder) if rank == 0 else [])], model, said)
    writer = ShardWriter(folder, rank, max_shard_bytes)
    try:
        _of_all_ranks(folder, partial(folder.mkdir, parents=True, exist_ok=True))
        every = _of_all_ranks(folder, partial(_write_all, model, said, writer, dtype))
        _of_all_ranks(folder, partial(writer.publish, every))
        rest = {INDEX: index_of(every), "config.json": content}
        _of_all_ranks(folder, partial(_write_rest, writer, rest if rank == 0 else {}, companions))
    except BaseException:
        writer.discard()
        raise


def _of_all_ranks(folder: Path, own: Callable[[], _T]) -> list[_T]:
    """What all ranks' calls give. A rank that fails says so, for others would wait for it. Collective over the world.

    Raises:
        CheckpointError: on all ranks, if any fails.
    """
    result, failure = None, None
    try:
        result = own()
    except Exception as error:
        failure = error
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, (result, None if failure is None else f"{type(failure).__name__}: {failure}"))
    failed = [f"rank {rank}: {told}" for rank, (_, told) in enumerate(every) if told is not None]
    if failed:
        raise CheckpointError(
            f"asked: a Hugging Face folder {str(folder)!r}; found: {'; '.join(failed)}; do: give a folder that all ranks can "
            "write to, with room for the weights"
        ) from failure
    return [given for given, _ in every]


def _write_all(
    model: MegatronModel, said: HuggingFaceConfig, writer: ShardWriter, dtype: torch.dtype | None
) -> list[dict[str, int]]:
    """Write what is this rank's to write. One that cannot goes on giving its parts of weights to the others, and raises then."""
    failure: Exception | None = None
    for tensors in _tensors(model, said):
        try:
            if failure is None:
                for name, tensor in tensors.items():
                    writer.add(name, tensor, dtype)
        except Exception as error:
            failure = error
    if failure is not None:
        raise failure
    writer.flush()
    return writer.written


def _tensors(model: MegatronModel, said: HuggingFaceConfig) -> Iterator[dict[str, Tensor]]:
    """The tensors that this rank writes; gathers each weight over the first of the ranks that hold it, for the first of these."""
    from megatron.core import parallel_state

    for weight in weights_of(model):
        source = source_of(weight.name, said.family)
        replica = (
            parallel_state.get_expert_data_parallel_rank()
            if weight.expert
            else parallel_state.get_data_parallel_rank(with_context_parallel=True)
        )
        if source is None or weight.copied or replica:
            continue
        whole = weight.whole(weight.parameter)
        if weight.group.rank() == 0:
            yield source.split(whole, model.config.kv_channels, model.config.num_query_groups)


def _write_rest(writer: ShardWriter, contents: Mapping[str, Any], companions: str | Path | None) -> None:
    """Write JSON files, and copy what belongs to the model, if there is anything to write."""
    if contents and companions is not None:
        _copy_companions(Path(companions), writer.path)
    for name, content in contents.items():
        if content is not None:
            writer.files.append(writer.path / name)
            writer.files[-1].write_text(json.dumps(content, indent=2) + "\n")


def _unnamed(model: MegatronModel, said: HuggingFaceConfig) -> list[Problem]:
    """Weights that the family has no name for."""
    names = [weight.name for weight in weights_of(model) if source_of(weight.name, said.family) is None]
    remedy = "save the run's checkpoint instead, or train a model of a family that has it"
    found = [(f"the weight {name}", f"nothing like it in a {said.family.architecture}") for name in names]
    if any(isinstance(layer, ScalarHead) for layer in model.modules()):
        found.append(
            ("a model with a ScalarHead", f"a {said.family.architecture}, whose head is one of the vocabulary")
        )
    return [Problem(asked, why, remedy) for asked, why in found]


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
