"""A training script as a user would write it; run in its own processes by the launcher tests.

python -m tests.support.script STRATEGY DEVICES OUT [kill]
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch

import lightning_dcp
from tests.support.training import TinyModule, loader

LENGTHS = (30, 3, 30, 7, 1, 12, 5, 29, 2, 31, 16, 9)


class Killing(L.Callback):
    """Kills one rank in the middle of training."""

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, index: int) -> None:
        if index == 1 and trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def train(strategy: Any, devices: int, **options: Any) -> dict[str, Any]:
    """Train the tiny module and return its loss and weights."""
    torch.set_num_threads(1)
    run = L.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    module = TinyModule(lr=0.1)
    run.fit(module, loader(LENGTHS, 4))
    weights = {name: p.detach().flatten().tolist()[:5] for name, p in module.named_parameters()}
    return {"loss": float(run.callback_metrics["train_loss_step"]), "weights": weights, "rank": run.global_rank}


if __name__ == "__main__":
    name, devices, out = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    chosen: Any = lightning_dcp.DCPStrategy(max_seqlen_per_dp_cp_rank=16) if name == "object" else name
    result = train(chosen, devices, callbacks=[Killing()] if "kill" in sys.argv else [])
    if result["rank"] == 0:
        out.write_text(json.dumps(result))
