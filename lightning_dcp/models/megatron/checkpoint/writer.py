"""Writing shards in torch's format, in the foreground or by a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemWriter, save

from lightning_dcp.errors import CheckpointError
from lightning_dcp.models.megatron.checkpoint.directory import begin, commit, unfinished
from lightning_dcp.models.megatron.checkpoint.first_rank import on_first_rank
from lightning_dcp.models.megatron.checkpoint.text import naming_failures
from lightning_dcp.models.megatron.checkpoint.weights import Sharded
from lightning_dcp.models.megatron.cpu import on_cpu


def planned_write(
    sharded: Sharded, path: Path, group: dist.ProcessGroup, device: torch.device, *, snapshot: bool
) -> Callable[[], None]:
    """Prepare a checkpoint. Collective over the world, as is the call of what it returns.

    Args:
        sharded: this rank's shards; taken apart.
        path: the checkpoint's place; it is written beside it.
        group: a gloo group of the world that nothing else uses while the shards are written.
        device: the run's.
        snapshot: copy this rank's shards to the CPU, so that training may go on before they are written.

    Returns:
        Writes the shards and, once all ranks have, gives the checkpoint its name. Raises CheckpointError on all ranks if one
        cannot.
    """
    from megatron.core import dist_checkpointing

    strategy = _torch_writer()(group, snapshot)
    with on_cpu(device):
        request: Any = dist_checkpointing.save(sharded, str(unfinished(path)), strategy, async_sharded_save=True)
    return partial(_write_and_commit, request.async_fn, path, group)


def _write_and_commit(write: Callable[[], None], path: Path, group: dist.ProcessGroup) -> None:
    with naming_failures(f"the checkpoint {path} could not be written"):
        write()

    def complete() -> None:
        _complete(unfinished(path))
        commit(path)

    on_first_rank(complete, f"the checkpoint {path} could not be completed", group)


def _complete(directory: Path) -> None:
    """What ``dist_checkpointing.save`` does behind a write, without its barrier, which a thread must not meet."""
    from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config

    common = directory / "common.pt"
    if not common.exists():  # Megatron-Core 0.16 does not read without, and later releases take it where it is
        torch.save({}, common)
    save_config(CheckpointingConfig("torch_dist", 1), str(directory))


@cache
def _torch_writer() -> type:
    """The class, made on first use: its base belongs to Megatron-Core."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor
    from megatron.core.dist_checkpointing.strategies import torch as torch_format
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest

    class TorchWriter(torch_format.TorchDistSaveShardedStrategy):
        """Megatron-Core's own writer starts processes that import the user's script again; torch's does not."""

        def __init__(self, group: dist.ProcessGroup, snapshot: bool) -> None:
            super().__init__("torch_dist", 1)
            self.group, self.snapshot = group, snapshot

        def async_save(self, sharded_state_dict: Sharded, checkpoint_dir: str, *unused: Any) -> Any:
            """A request whose function writes; it holds all that it needs."""
            shards, _, _ = torch_format._replace_state_dict_keys_with_sharded_keys(sharded_state_dict, True)
            if self.snapshot:
                shards = {key: [_copy(shard) for shard in parts] for key, parts in shards.items()}
            state = torch_format.mcore_to_pyt_state_dict(shards, False)
            planner = torch_format.MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
            write = partial(
                save, state, storage_writer=FileSystemWriter(checkpoint_dir), planner=planner, process_group=self.group
            )
            return AsyncRequest(write, (), [])

    def _copy(shard: Any) -> Any:
        if not isinstance(shard, ShardedTensor):
            return shard  # an object, which becomes bytes at once
        return replace(shard, data=shard.data.detach().to("cpu", copy=True))

    return TorchWriter


class BackgroundWrite:
    """A thread that writes one checkpoint; an error is raised where it is waited for.

    Args:
        path: the checkpoint's place.
        write: writes it.
    """

    def __init__(self, path: Path, write: Callable[[], None]) -> None:
        self.path, self._write = path, write
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._write()
        except BaseException as error:
            self._error = error

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until it is written, or for so long; whether it is.

        Raises:
            Exception: what the thread raised.
        """
        self._thread.join(seconds)
        if self._error is not None:
            raise self._error
        return not self._thread.is_alive()


def begin_on_all_ranks(path: Path, control: dist.ProcessGroup) -> None:
    """Make the directory that a checkpoint is written to. Collective over the world.

    Raises:
        CheckpointError: rank 0 cannot, or others do not see it; on all ranks.
    """
    on_first_rank(partial(begin, path), f"no checkpoint can be written to {path}", control)
    seen: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(seen, unfinished(path).is_dir(), control)
    blind = [rank for rank, sees in enumerate(seen) if not sees]
    if blind:
        raise CheckpointError(
            f"asked: a sharded checkpoint at {path}; found: rank(s) {blind} do not see a directory that rank 0 has made "
            "there; do: give a path on a file system that all nodes share"
        )
