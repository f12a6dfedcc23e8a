"""What a checkpoint says of each weight: its key, its part of the whole, and who writes it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor, nn

from lightning_dcp.errors import CheckpointError
from lightning_dcp.models.megatron.checkpoint.text import listed
from lightning_dcp.models.megatron.model import MegatronModel
from lightning_dcp.models.megatron.weights import weights_of

Sharded = dict[str, Any]
"""Names of this rank to ``dist_checkpointing``'s ShardedTensors, or factories of several of them."""


def models_of(module: nn.Module) -> dict[str, MegatronModel]:
    """The Megatron-Core models of a module, by attribute path."""
    return {name: child for name, child in module.named_modules() if isinstance(child, MegatronModel)}


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
    """The part of a module's ``state_dict()`` that lies outside its Megatron-Core models, the same on all ranks."""
    return {name: value for name, value in module.state_dict().items() if not _inside(name, models_of(module))}


def load_outside_state(module: nn.Module, state: Mapping[str, Any], *, strict: bool) -> None:
    """Set what :func:`outside_state` gave.

    Raises:
        CheckpointError: with ``strict``, other names than the module's.
    """
    models = models_of(module)
    found = module.load_state_dict(state, strict=False)
    lines = [
        *listed("not in the checkpoint", [name for name in found.missing_keys if not _inside(name, models)]),
        *listed("not in the module", found.unexpected_keys),
    ]
    if strict and lines:
        raise CheckpointError(
            "the checkpoint is of another module (outside its Megatron-Core models):\n" + "\n".join(lines)
        )


def _inside(name: str, models: Mapping[str, MegatronModel]) -> bool:
    return any(name.startswith(f"{path}.") for path in models)


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

    models = models_of(module)
    named = {id(p): entry for path, model in models.items() for p, entry in _in_model(model, path)}
    for name, parameter in module.named_parameters():
        if id(parameter) not in named and not _inside(name, models):
            sharded = ShardedTensor.from_rank_offsets(name, parameter, replica_id=dist.get_rank())
            named[id(parameter)] = NamedParameter(name, sharded)
    return named


def _in_model(model: MegatronModel, path: str) -> Iterator[tuple[Tensor, NamedParameter]]:
    shards = {id(s.data): s for chunk in sharded_chunks(model, path) for s in chunk.values()}
    for weight in weights_of(model):
        if id(weight.parameter) in shards:
            yield weight.parameter, NamedParameter(f"{path}.{weight.name}", shards[id(weight.parameter)])
