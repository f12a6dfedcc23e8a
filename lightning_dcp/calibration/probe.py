"""What a run tells of its attention while it is measured."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_dcp.calibration.kernel_speed import Table, attention_efficiency
from lightning_dcp.calibration.record import AttentionCalls, recording


class AttentionProbe(Callback):
    """Records the attention calls of the first step, whose packs must be on single ranks; times the kernel at the end.

    Args:
        max_seqlen_per_dp_cp_rank: the longest sequence that one rank may hold, in tokens.

    Attributes:
        calls: the first step's attention calls.
        efficiency: the kernel's, as rank 0 measured it while the others waited.
    """

    def __init__(self, max_seqlen_per_dp_cp_rank: int) -> None:
        self.max_seqlen_per_dp_cp_rank = max_seqlen_per_dp_cp_rank
        self.calls = AttentionCalls()
        self.efficiency: Table = ((1, 1.0),)
        self._recording = ExitStack()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Begin to record the first step."""
        if batch_idx == 0:
            self.calls = self._recording.enter_context(recording())

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Stop recording."""
        self._recording.close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Stop recording."""
        self._recording.close()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Time the kernel alone."""
        strategy, table = trainer.strategy, self.efficiency
        strategy.barrier("before the attention kernel is timed")
        if trainer.is_global_zero:
            table = attention_efficiency(self.calls, self.max_seqlen_per_dp_cp_rank, strategy.root_device)
        self.efficiency = strategy.broadcast(table)
