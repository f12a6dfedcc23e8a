"""Weights of a Hugging Face folder into the parts that ranks hold."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dcp.errors import Problem, raise_problems
from lightning_dcp.models.megatron.huggingface.config import read_config
from lightning_dcp.models.megatron.huggingface.families import Family
from lightning_dcp.models.megatron.huggingface.folder import WeightFolder
from lightning_dcp.models.megatron.huggingface.names import Source, source_of
from lightning_dcp.models.megatron.model import MegatronModel
from lightning_dcp.models.megatron.scalar_head import ScalarHead
from lightning_dcp.models.megatron.weights import Weight, weights_of

_SHOWN = 5
_REMEDY = (
    "make the model of the folder's own config (MegatronGPT.from_huggingface(path)), without other sizes in config"
)


@torch.no_grad()
def load_huggingface(model: MegatronModel, path: str | Path) -> None:
    """Set this rank's weights from a Hugging Face folder. Collective over the world.

    Each rank reads the tensors of its own layers and experts, and of these its tensor-parallel part alone. Values are
    rounded to the model's dtype. A :class:`~lightning_dcp.models.megatron.ScalarHead` keeps the values that it has, as the
    folder's head is one of the vocabulary.

    Args:
        model: the model, on any layout.
        path: a folder with ``config.json`` and safetensors.

    Raises:
        ConfigurationError: on all ranks alike: weights that the folder does not have, tensors that the model does not
            have, other shapes.
    """
    family = read_config(path).family
    problems: list[Problem] = []
    used: set[str] = set()
    kept = {id(layer.weight) for layer in model.modules() if isinstance(layer, ScalarHead)}
    with WeightFolder(path) as folder:
        for weight in weights_of(model):
            source = source_of(weight.name, family)
            used.update(source.names if source else ())
            if id(weight.parameter) in kept:
                continue
            found = list(_problems(model, folder, weight, source, family))
            problems += found
            if source is not None and not found:
                weight.parameter.copy_(_part(model, folder, weight, source))
        raise_problems(_of_all_ranks(model, folder, used, problems))


def _problems(
    model: MegatronModel, folder: WeightFolder, weight: Weight, source: Source | None, family: Family
) -> Iterator[Problem]:
    if source is None:
        yield Problem(f"the weight {weight.name}", f"nothing like it in a {family.architecture}", _REMEDY)
        return
    absent = [name for name in source.names if name not in folder.files]
    if absent:
        yield Problem(f"the weight {weight.name}", f"no {', '.join(absent)} in {str(folder.path)!r}", _REMEDY)
        return
    config = model.config
    rows = (config.num_attention_heads * config.kv_channels, config.num_query_groups * config.kv_channels)
    for name, shape in zip(source.names, source.shapes(weight.whole_shape, *rows), strict=True):
        if folder.shape(name) != shape:
            yield Problem(
                f"{name} of shape {list(shape)}", f"{list(folder.shape(name))} in {str(folder.path)!r}", _REMEDY
            )


def _part(model: MegatronModel, folder: WeightFolder, weight: Weight, source: Source) -> Tensor:
    """This rank's part: as tensor-parallel ranks hold whole query groups, it is made of the tensors' own parts."""
    size, rank = (1, 0) if weight.split_dim is None else (weight.group.size(), weight.group.rank())
    parts = [folder.part(name, weight.split_dim, rank, size) for name in source.names]
    return source.join(parts, model.config.kv_channels)


def _of_all_ranks(model: MegatronModel, folder: WeightFolder, used: set[str], own: list[Problem]) -> list[Problem]:
    """The problems of all ranks, each once, and tensors that no rank has a place for."""
    every: list[tuple[list[Problem], set[str]]] = [(own, used)] * dist.get_world_size()
    dist.all_gather_object(every, (own, used))
    problems = list(dict.fromkeys(problem for found, _ in every for problem in found))
    left = set(folder.files).difference(*(names for _, names in every))
    left = {
        name for name in left if not name.endswith("rotary_emb.inv_freq")
    }  # saved by old releases, computed by ours
    if model.chunk.share_embeddings_and_output_weights:
        left.discard("lm_head.weight")
    if left:
        shown = ", ".join(sorted(left)[:_SHOWN]) + (", ..." if len(left) > _SHOWN else "")
        asked = f"weights of {str(folder.path)!r}"
        problems.append(Problem(asked, f"{len(left)} tensor(s) that the model has no place for: {shown}", _REMEDY))
    return problems
