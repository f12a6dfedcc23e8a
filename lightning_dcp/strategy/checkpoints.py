"""Checkpoints: Lightning's files, or directories of shards where ranks hold different weights."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from torch.optim import Optimizer

from lightning_dcp.errors import CheckpointError
from lightning_dcp.models.megatron.checkpoint import ShardedCheckpoints, hyper_parameters, is_sharded, outside_state
from lightning_dcp.models.megatron.distributed_state import WholeState
from lightning_dcp.models.megatron.model import megatron_models
from lightning_dcp.strategy.state import StrategyState


class CheckpointHooks(StrategyState):
    """Hooks of Lightning's that save and load."""

    @property
    def _sharded(self) -> ShardedCheckpoints | None:
        """What saves and loads modules with a Megatron-Core model; None: Lightning does, as always."""
        return self._checkpoints if megatron_models(self._module) else None

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """As in Lightning; without the Megatron-Core models, whose weights are shards."""
        return super().lightning_module_state_dict() if self._sharded is None else outside_state(self._module)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """As in Lightning; with a Megatron-Core model without what is in shards."""
        return (
            super().optimizer_state(optimizer)
            if self._sharded is None
            else {"param_groups": hyper_parameters(optimizer)}
        )

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """As in Lightning; with a Megatron-Core model a directory of shards. Every rank calls it."""
        if self._sharded is None:
            return super().save_checkpoint(checkpoint, filepath, storage_options)
        write_rest = partial(self.checkpoint_io.save_checkpoint, storage_options=storage_options)
        running = self._trainer.state.status == TrainerStatus.RUNNING  # afterwards nobody would wait for it
        with self._naming_failures():
            self._sharded.save(
                filepath,
                self._module,
                self._whole_states(gather="optimizer_states" in checkpoint),
                checkpoint,
                write_rest,
                in_background=self.async_checkpoint and running,
            )
        return None

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """As in Lightning."""
        if self._sharded is None:
            super().remove_checkpoint(filepath)
        else:
            with self._naming_failures():
                self._sharded.remove(filepath)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """As in Lightning; of a directory of shards all but these."""
        if self._sharded is not None:
            read_rest = partial(self.checkpoint_io.load_checkpoint, weights_only=weights_only)
            fitting = self._trainer.state.fn == TrainerFn.FITTING
            return self._sharded.load(checkpoint_path, read_rest, resume=fitting)
        if is_sharded(checkpoint_path):
            raise CheckpointError(
                f"asked: the checkpoint {checkpoint_path}; found: shards of a Megatron-Core model, and none in the module; "
                "do: use the module that it was written with, which makes its MegatronModel in configure_model"
            )
        return super().load_checkpoint(checkpoint_path, weights_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """As in Lightning; of a directory of shards those of this rank."""
        if self._sharded is None:
            super().load_model_state_dict(checkpoint, strict)
        else:
            with self._naming_failures():
                self._sharded.load_module(self._module, checkpoint, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """As in Lightning; of a directory of shards those of this rank."""
        if self._sharded is None:
            super().load_optimizer_state_dict(checkpoint)
        else:
            with self._naming_failures():
                self._sharded.load_optimizers(self._module, self._whole_states(), checkpoint)
            _optimizers_to_device(self.optimizers, self.root_device)

    def _whole_states(self, *, gather: bool = False) -> list[Any]:
        """The optimizers, as checkpoints see them."""
        if self._distributed is None:
            if gather and self.distributed_optimizer:
                raise CheckpointError(
                    "asked: a checkpoint with optimizer states after a run; found: distributed_optimizer=True, whose states end "
                    "with the run; do: save in the run (ModelCheckpoint, or trainer.save_checkpoint in on_train_end), or give "
                    "trainer.save_checkpoint(..., weights_only=True)"
                )
            return list(self.optimizers)
        whole = WholeState(self._distributed)
        if gather:
            whole.gather()
        return [whole]

    def _end_checkpoints(self) -> None:
        if self._checkpoints is None:
            return
        if self._trainer.state.status == TrainerStatus.INTERRUPTED:
            self._checkpoints.give_up()
        else:
            with self._naming_failures():
                self._checkpoints.finish()
