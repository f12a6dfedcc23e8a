"""Weights of a whole Megatron-Core model from the parts that ranks hold, and back.

Whole weights have the names and values that the model has on one rank (tensor, pipeline and expert parallel size 1):
layers and experts are numbered through.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_dcp.errors import RegionError
from lightning_dcp.models.megatron.model import MegatronModel

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.local_experts\.(\d+)\.|(?<=linear_fc[12])\.(weight|bias)(\d+)$")
"""An expert's number: a layer of its own each, or a parameter of one grouped layer."""
_JOINED_EXPERTS = re.compile(r"\.experts\.weight[12]$")
"""All experts of a rank in one parameter."""
_EXPERT_SPLIT = ((re.compile(r"\.linear_fc1\."), 0), (re.compile(r"\.linear_fc2\.weight"), 1))
"""By which dimension expert-tensor-parallel ranks share a weight. The attributes that tell it of other weights are wrong
for Transformer Engine's experts, whose communication is Megatron-Core's."""


@dataclass(frozen=True)
class Weight:
    """One weight of this rank.

    Attributes:
        name: of the whole weight.
        parameter: this rank's part.
        split_dim: the dimension that ranks of the group hold parts of; None if they hold the same.
        group: the ranks that hold the other parts.
        gated: whether the part is a gate's and an up-projection's, one below the other.
        expert: whether it is an expert's, which ranks outside the expert-parallel place do not hold.
        copied: whether another stage holds it, too, and is the one that speaks of it.
    """

    name: str
    parameter: Tensor
    split_dim: int | None
    group: Any
    gated: bool
    expert: bool
    copied: bool

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """Shape of the whole weight."""
        shape = list(self.parameter.shape)
        if self.split_dim is not None:
            shape[self.split_dim] *= self.group.size()
        return tuple(shape)

    def whole(self, part: Tensor) -> Tensor:
        """The whole of a tensor like the parameter, of which each rank of the group has its part. Collective over it."""
        if self.split_dim is None or self.group.size() == 1:
            return part.detach().clone()
        parts = [torch.empty_like(part) for _ in range(self.group.size())]
        dist.all_gather(parts, part.detach().contiguous(), group=self.group)
        if self.gated:
            gates, ups = zip(*(p.chunk(2, self.split_dim) for p in parts), strict=True)
            parts = [*gates, *ups]
        return torch.cat(parts, self.split_dim)

    def part(self, whole: Tensor) -> Tensor:
        """This rank's part of a whole weight."""
        if self.split_dim is None or self.group.size() == 1:
            return whole
        size, rank = self.group.size(), self.group.rank()
        if self.gated:
            halves = whole.chunk(2, self.split_dim)
            return torch.cat([half.chunk(size, self.split_dim)[rank] for half in halves], self.split_dim)
        return whole.chunk(size, self.split_dim)[rank]


def weights_of(model: MegatronModel) -> Iterator[Weight]:
    """This rank's weights, and its buffers that are saved (the experts' biases in routing), those of all its chunks.

    Raises:
        RegionError: experts in one joined parameter, as ``GroupedMLP`` without Transformer Engine holds them.
    """
    from megatron.core import parallel_state

    config = model.config
    tensor, expert_tensor = (
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_expert_tensor_parallel_group(),
    )
    first_expert = parallel_state.get_expert_model_parallel_rank() * _experts_here(config)
    for chunk in model.chunks:
        for name, parameter in (*chunk.named_parameters(), *_saved_buffers(chunk)):
            if _JOINED_EXPERTS.search(name):
                raise RegionError(
                    f"{name} holds all experts of a rank in one parameter, which no single expert can be read from. Use "
                    "moe_grouped_gemm=False, or backend='transformer_engine'"
                )
            expert = _EXPERT.search(name) is not None
            dim = _expert_split(name) if expert else _split(parameter)
            gated = bool(config.gated_linear_unit) and "linear_fc1" in name and "layer_norm" not in name
            copied = bool(getattr(parameter, "shared_embedding", False)) and not chunk.pre_process
            group = expert_tensor if expert else tensor
            yield Weight(_whole_name(chunk, name, first_expert), parameter, dim, group, gated, expert, copied)


def _saved_buffers(chunk: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for prefix, module in chunk.named_modules():
        for name, buffer in module.named_buffers(prefix, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                yield name, buffer


def _split(parameter: Tensor) -> int | None:
    return int(getattr(parameter, "partition_dim", 0)) if getattr(parameter, "tensor_model_parallel", False) else None


def _expert_split(name: str) -> int | None:
    return next((dim for found, dim in _EXPERT_SPLIT if found.search(name)), None)


def whole_weights(model: MegatronModel, value: Callable[[Tensor], Tensor | None] = lambda p: p) -> dict[str, Tensor]:
    """All weights of the whole model, or tensors like them, on every rank and on the CPU. Collective over the world.

    For small models: every rank holds all of it. :func:`~lightning_dcp.models.megatron.huggingface.save_huggingface` writes
    large ones.

    Args:
        model: the model.
        value: what to gather of each parameter: itself by default, or its gradient, say. None is left out.
    """
    own = {}
    for weight in weights_of(model):
        tensor = value(weight.parameter)
        if tensor is not None and not weight.copied:
            own[weight.name] = weight.whole(tensor).cpu()
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    return {name: tensor for part in every for name, tensor in part.items()}


@torch.no_grad()
def load_whole_weights(model: MegatronModel, whole: Callable[[str], Tensor]) -> None:
    """Set this rank's weights.

    Args:
        model: the model.
        whole: gives a whole weight by its name.
    """
    for weight in weights_of(model):
        weight.parameter.copy_(weight.part(whole(weight.name)))


def _experts_here(config: Any) -> int:
    return (config.num_moe_experts or 0) // config.expert_model_parallel_size


def _whole_name(chunk: Any, name: str, first_expert: int) -> str:
    """The weight's name in the whole model; a head that shares the embedding's weight has the embedding's name."""
    if name == "output_layer.weight" and chunk.share_embeddings_and_output_weights:
        return "embedding.word_embeddings.weight"
    layer = _LAYER.match(name)
    if layer is None:
        return name
    number = chunk.decoder.layers[int(layer[1])].layer_number - 1
    return _EXPERT.sub(partial(_numbered, first_expert), f"decoder.layers.{number}.{name[layer.end() :]}")


def _numbered(first_expert: int, found: re.Match[str]) -> str:
    if found[1]:
        return f".local_experts.{int(found[1]) + first_expert}."
    return f".{found[2]}{int(found[3]) + first_expert}"
