"""Sharded checkpoints of a run: saved, resumed from, removed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from lightning_dcp.errors import CheckpointError
from lightning_dcp.models.megatron.checkpoint import streams
from lightning_dcp.models.megatron.checkpoint.directory import REST, is_sharded, local_path, remove, unfinished
from lightning_dcp.models.megatron.checkpoint.first_rank import on_first_rank
from lightning_dcp.models.megatron.checkpoint.optimizers import joined, load_state, sharded_state, wanted_state
from lightning_dcp.models.megatron.checkpoint.reader import checked, read
from lightning_dcp.models.megatron.checkpoint.weights import (
    Sharded,
    load_outside_state,
    named_parameters,
    sharded_chunks,
)
from lightning_dcp.models.megatron.checkpoint.writer import BackgroundWrite, begin_on_all_ranks, planned_write
from lightning_dcp.models.megatron.model import megatron_models
from lightning_dcp.parallel.groups import ParallelGroups

_PATH, _STATES = "sharded_checkpoint", "random_states"
_PATIENCE = 30.0
"""Seconds that a run which ends by an error waits for a checkpoint under way."""


class ShardedCheckpoints:
    """Checkpoints that are directories, written and read by all ranks together.

    Weights of Megatron-Core models and all optimizer states are shards, in torch's format, by Megatron-Core's
    ``dist_checkpointing``: a run on another layout finds its parts. The rest of a Lightning checkpoint is one file in the
    directory, with the random states of each rank. The directory gets its name when it is complete.

    Every method but :meth:`resume_random_states` and :meth:`give_up` is collective over the world.

    Args:
        groups: the run's process groups.
        device: the run's device.
        timeout: how long ranks wait for others while a checkpoint is written in the background; torch's default if None.
    """

    def __init__(self, groups: ParallelGroups, device: torch.device, *, timeout: timedelta | None = None) -> None:
        self._groups, self._device, self._timeout = groups, device, timeout
        self._background: dist.ProcessGroup | None = None
        self._pending: BackgroundWrite | None = None
        self._outdated: list[Path] = []
        self._random: streams.States | None = None

    def save(
        self,
        path: str | Path,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        rest: dict[str, Any],
        write_rest: Callable[[dict[str, Any], Path], None],
        *,
        in_background: bool,
    ) -> None:
        """Save a checkpoint; the one before is finished first.

        Args:
            path: the directory.
            module: the module.
            optimizers: whose states are saved if ``rest`` has ``optimizer_states``.
            rest: a Lightning checkpoint without what is in shards; random states and single values of optimizers are
                added.
            write_rest: writes it to a file; called on rank 0.
            in_background: copy the shards, and let a thread write them.

        Raises:
            CheckpointError: a directory that ranks do not share or rank 0 cannot write to, or an optimizer state that cannot
                be sharded; and what :meth:`finish` raises.
        """
        self.finish()
        target = self._agreed(path)
        sharded: Sharded = {
            f"{name}/{number}": chunk
            for name, model in megatron_models(module).items()
            for number, chunk in enumerate(sharded_chunks(model, name))
        }
        if "optimizer_states" in rest:
            sharded["optimizers"], catalogs = sharded_state(optimizers, named_parameters(module))
            entries = zip(rest["optimizer_states"], joined(catalogs, self._groups.control), strict=True)
            rest["optimizer_states"] = [{**state, "parameters": catalog} for state, catalog in entries]
            rest[_STATES] = streams.gathered(streams.random_states(self._device), self._groups.control)
        begin_on_all_ranks(target, self._groups.control)
        group = self._background_group() if in_background else self._groups.control
        # Megatron-Core first: it takes a directory that holds something for what is left of an earlier checkpoint.
        write = planned_write(sharded, target, group, self._device, snapshot=in_background)
        write_file = partial(write_rest, rest, unfinished(target) / REST)
        on_first_rank(write_file, f"the checkpoint {target} could not be written", self._groups.control)
        if in_background:
            self._pending = BackgroundWrite(target, write)
        else:
            write()

    def finish(self) -> None:
        """Wait for the checkpoint under way; then those go that :meth:`remove` was to delete meanwhile.

        Raises:
            CheckpointError: it could not be written, and the others have stayed; or they could not be deleted.
        """
        pending, outdated = self._taken()
        if pending is not None:
            pending.wait()
            for path in outdated:
                self._remove(path)

    def give_up(self) -> None:
        """Before the end of a run that failed: give a checkpoint under way some time, as other ranks may still write."""
        pending, outdated = self._taken()
        if pending is None:
            return
        try:
            written = pending.wait(_PATIENCE)
        except Exception as error:
            warnings.warn(f"the checkpoint {pending.path} could not be written: {error!r}", stacklevel=2)
            return
        if not written:
            warnings.warn(f"the checkpoint {pending.path} was not finished", stacklevel=2)
        elif dist.get_rank() == 0:
            for path in outdated:
                remove(path)

    def remove(self, path: str | Path) -> None:
        """Delete a checkpoint; while another is written, once that is complete: it may be the last that can be read.

        Raises:
            CheckpointError: rank 0 cannot.
        """
        target = self._agreed(path)
        if self._pending is not None and self._pending.path != target:
            self._outdated.append(target)
            return
        self.finish()
        self._remove(target)

    def load(self, path: str | Path, read_rest: Callable[[Path], dict[str, Any]], *, resume: bool) -> dict[str, Any]:
        """Read what is not in shards; it is to be handed to the other methods.

        Args:
            path: the directory.
            read_rest: reads the file in it.
            resume: whether training goes on, with the checkpoint's random states.

        Raises:
            CheckpointError: no sharded checkpoint.
        """
        self.finish()
        target = local_path(path)
        if not is_sharded(target):
            found = "a file" if target.is_file() else "a directory without shards" if target.is_dir() else "nothing"
            raise CheckpointError(
                f"asked: a checkpoint of a module with a Megatron-Core model at {path}; found: {found}; do: give a directory "
                "that a run with such a model has saved"
            )
        rest = read_rest(target / REST)
        rest[_PATH] = str(target)
        if resume and "optimizer_states" in rest:
            self._random = streams.own_states(rest.get(_STATES))
        return rest

    def load_module(self, module: nn.Module, rest: Mapping[str, Any], *, strict: bool) -> None:
        """Set the weights of a module.

        Raises:
            CheckpointError: the checkpoint is of another model.
        """
        path = Path(rest[_PATH])
        chunks = [
            (chunk, sharded)
            for name, model in megatron_models(module).items()
            for chunk, sharded in zip(model.chunks, sharded_chunks(model, name), strict=True)
        ]
        found = checked([sharded for _, sharded in chunks], path, self._groups.control, strict=strict)
        loaded = read({str(number): sharded for number, sharded in enumerate(found)}, path, self._device)
        for number, (chunk, _) in enumerate(chunks):
            chunk.load_state_dict(loaded.get(str(number), {}), strict=False)  # names were compared above
        load_outside_state(module, rest["state_dict"], strict=strict)

    def load_optimizers(self, module: nn.Module, optimizers: Sequence[Optimizer], rest: Mapping[str, Any]) -> None:
        """Set the states of the optimizers.

        Raises:
            CheckpointError: the checkpoint is of other optimizers.
        """
        states = rest["optimizer_states"]
        if len(states) != len(optimizers):
            raise CheckpointError(
                f"the run has {len(optimizers)} optimizer(s) and the checkpoint {len(states)}: resume with the "
                "configure_optimizers that the checkpoint was written with"
            )
        named = named_parameters(module)
        wanted: Sharded = {}
        for number, (optimizer, saved) in enumerate(zip(optimizers, states, strict=True)):
            wanted |= wanted_state(optimizer, number, saved["parameters"], named)
        tensors = read(wanted, Path(rest[_PATH]), self._device)
        for number, (optimizer, saved) in enumerate(zip(optimizers, states, strict=True)):
            load_state(optimizer, number, saved, tensors, named)

    def resume_random_states(self) -> None:
        """Go on with the checkpoint's random states, if training has been resumed and has not come here yet.

        To be called when the first batch has been read: what the set-up draws, and reading that batch again, is not in the
        stream of a run that was not interrupted.
        """
        states, self._random = self._random, None
        if states is not None:
            streams.restore(states, self._device)

    def _agreed(self, path: str | Path) -> Path:
        """Rank 0's path, on all ranks."""
        paths: list[Any] = [str(local_path(path))]
        dist.broadcast_object_list(paths, 0, group=self._groups.control)
        return Path(paths[0])

    def _remove(self, target: Path) -> None:
        on_first_rank(partial(remove, target), f"the checkpoint {target} could not be deleted", self._groups.control)

    def _taken(self) -> tuple[BackgroundWrite | None, list[Path]]:
        """The checkpoint under way, and those that go once it is complete; nothing is left of them here."""
        taken = self._pending, self._outdated
        self._pending, self._outdated = None, []
        return taken

    def _background_group(self) -> dist.ProcessGroup:
        if self._background is None:
            self._background = dist.new_group(list(self._groups.world_ranks), self._timeout, "gloo")
        return self._background
