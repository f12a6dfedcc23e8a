"""Reading shards, after a look at whether the checkpoint is one of this model."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader

from lightning_dcp.errors import CheckpointError
from lightning_dcp.models.megatron.checkpoint.optimizers import PREFIX
from lightning_dcp.models.megatron.checkpoint.text import listed, naming_failures
from lightning_dcp.models.megatron.checkpoint.weights import Sharded
from lightning_dcp.models.megatron.cpu import on_cpu

Shapes = dict[str, tuple[int, ...]]


def read(sharded: Mapping[str, Any], path: Path, device: torch.device) -> dict[str, Any]:
    """Load shards; the same structure, with tensors. Collective over the world.

    Args:
        sharded: names of this rank to shards; may be nested.
        path: the checkpoint.
        device: the run's.

    Raises:
        CheckpointError: a rank cannot read.
    """
    from megatron.core import dist_checkpointing

    with on_cpu(device), naming_failures(f"the checkpoint {path} could not be read"):
        return dict(dist_checkpointing.load(dict(sharded), str(path), validate_access_integrity=False))


def checked(sharded: list[Sharded], path: Path, control: dist.ProcessGroup, *, strict: bool) -> list[Sharded]:
    """Compare weights with a checkpoint; the same result or error on all ranks. Collective over the world.

    Args:
        sharded: this rank's weights.
        path: the checkpoint.
        control: a gloo group of the world.
        strict: whether names must be the same.

    Returns:
        The shards that the checkpoint has.

    Raises:
        CheckpointError: the checkpoint lacks weights of the model, or has others, or such of another shape.
    """
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(
        every, {key: shape for part in sharded for s in part.values() for key, shape in _shapes(s)}, control
    )
    wanted: Shapes = {key: shape for own in every for key, shape in own.items()}
    stored = stored_shapes(path)
    missing = [key for key in wanted if key not in stored]
    other = [
        f"{key} {stored[key]} for {shape}" for key, shape in wanted.items() if key in stored and stored[key] != shape
    ]
    unknown = [key for key in stored if key not in wanted and not key.startswith(f"{PREFIX}.")]
    names = [*listed("not in the checkpoint", missing), *listed("not in the model", unknown)]
    lines = [*(names if strict else []), *listed("of another shape (the checkpoint's for the model's)", other)]
    if lines:
        raise CheckpointError(
            f"the checkpoint {path} is of another model:\n"
            + "\n".join(lines)
            + "\n  do: build the model with the config that "
            "the checkpoint was written with; tensor, pipeline, expert and context parallel sizes may differ"
        )
    if names and dist.get_rank() == 0:
        warnings.warn(f"the checkpoint {path} is of another model:\n" + "\n".join(names), stacklevel=2)
    return [{n: s for n, s in part.items() if all(k in stored for k, _ in _shapes(s))} for part in sharded]


def stored_shapes(path: Path) -> Shapes:
    """The whole tensors of a checkpoint."""
    entries = FileSystemReader(path).read_metadata().state_dict_metadata
    return {key: tuple(entry.size) for key, entry in entries.items() if hasattr(entry, "size")}


def _shapes(sharded: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Keys and whole shapes that an entry stands for; none for objects."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    built = nested_values(sharded.build()) if isinstance(sharded, ShardedTensorFactory) else [sharded]
    for tensor in built:
        if isinstance(tensor, ShardedTensor):
            yield tensor.key, tuple(tensor.global_shape)
