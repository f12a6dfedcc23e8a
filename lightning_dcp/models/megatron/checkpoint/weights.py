"""What a checkpoint says of each weight: its key, its part of the whole, and who writes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor, nn

from lightning_dcp.errors import CheckpointError
from lightning_dcp.models.megatron.checkpoint.text import listed
from lightning_dcp.models.megatron.model import MegatronModel, megatron_models
from lightning_dcp.models.megatron.weights import weights_of

Sharded = dict[str, Any]
"""Names of this rank to ``dist_checkpointing``'s ShardedTensors, or factories of several of them."""


def sharded_chunks(model: MegatronModel, path: str) -> list[Sharded]:
    """The sharded weights of each of this rank's chunks, by their names in the chunk.

    Keys begin with the model's attribute path and number layers through, so that they are the same on all layouts.
    """
    from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding

    chunks = []
    for chunk in model.chunks:
        sharded = cast("Any", chunk).sharded_state_dict(
            metadata={"non_homogeneous_layers": True}
        )  # a key for each layer
        replace_prefix_for_sharding(sharded, "", f"{path}.")
        chunks.append(sharded)
    return chunks


def outside_state(module: nn.Module) -> dict[str, Any]:
    """The part of a module's ``state_dict()`` that lies outside its Megatron-Core models, the same on all ranks.

    What is of the models is so under any path that leads to it: ``self.body = self.model.chunks[0].decoder`` holds a rank's
    part, too.
    """
    inside = _inside(module)
    return {name: value for name, value in module.state_dict().items() if not inside(name)}


def load_outside_state(module: nn.Module, state: Mapping[str, Any], *, strict: bool) -> None:
    """Set what :func:`outside_state` gave.

    Raises:
        CheckpointError: with ``strict``, other names than the module's.
    """
    inside = _inside(module)
    found = module.load_state_dict({name: value for name, value in state.items() if not inside(name)}, strict=False)
    lines = [
        *listed("not in the checkpoint", [name for name in found.missing_keys if not inside(name)]),
        *listed("not in the module", [*found.unexpected_keys, *(name for name in state if inside(name))]),
    ]
    if strict and lines:
        raise CheckpointError(
            "the checkpoint is of another module (outside its Megatron-Core models):\n" + "\n".join(lines)
        )


def _inside(module: nn.Module) -> Callable[[str], bool]:
    """Tells of a name in a module's state whether its Megatron-Core models' shards hold what it stands for."""
    chunks = [model.chunks for model in megatron_models(module).values()]
    layers = {id(layer) for own in chunks for layer in own.modules()}
    tensors = {id(t) for own in chunks for t in (*own.parameters(), *own.buffers())}
    paths = {path for path, layer in module.named_modules(remove_duplicate=False) if id(layer) in layers}
    every = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    names = {name for name, tensor in every if id(tensor) in tensors}

    def inside(name: str) -> bool:
        parts = name.split(".")
        return name in names or any(".".join(parts[:n]) in paths for n in range(1, len(parts)))

    return inside


@dataclass(frozen=True)
class NamedParameter:
    """A parameter of this rank.

    Attributes:
        name: of the whole weight that it is a part of, the same on all layouts.
        sharded: its ShardedTensor, or the factory of several.
    """

    name: str
    sharded: Any


def named_parameters(module: nn.Module) -> dict[int, NamedParameter]:
    """All parameters of a module, by ``id``."""
    from megatron.core.dist_checkpointing import ShardedTensor

    inside = _inside(module)
    named = {id(p): entry for path, model in megatron_models(module).items() for p, entry in parameters_of(model, path)}
    for name, parameter in module.named_parameters():
        if id(parameter) not in named and not inside(name):
            sharded = ShardedTensor.from_rank_offsets(name, parameter, replica_id=dist.get_rank())
            named[id(parameter)] = NamedParameter(name, sharded)
    return named


def parameters_of(model: MegatronModel, path: str) -> Iterator[tuple[Tensor, NamedParameter]]:
    """This rank's parameters of a model at an attribute path."""
    shards = {id(s.data): s for chunk in sharded_chunks(model, path) for s in chunk.values()}
    for weight in weights_of(model):
        if id(weight.parameter) in shards:
            yield weight.parameter, NamedParameter(f"{path}.{weight.name}", shards[id(weight.parameter)])
