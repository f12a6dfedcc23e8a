"""Runs whose ranks are processes that end with them, as in notebooks: a Megatron-Core model that they train ends there, too.

Lightning hands the weights of rank 0 back to the process that goes on. A Megatron-Core model is made in
``configure_model``, in the ranks, and rank 0 has only its part of it.
"""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn

from lightning_dcp.errors import Problem, raise_problems
from lightning_dcp.models.megatron.model import megatron_models

KEEP = (
    "save it in the run (ModelCheckpoint among the callbacks, or model.save_huggingface in on_train_end) and give later runs "
    'ckpt_path="best", or "last" with ModelCheckpoint(save_last=True), or the directory'
)
"""What to do about a model that ends with its ranks."""


def check_processes(module: nn.Module, strategy: Any, trainer: Any) -> None:
    """Say before a fit what becomes of the model; refuse to evaluate one that is made anew after a fit.

    Args:
        module: the LightningModule, its model made.
        strategy: the run's; says how the ranks were started.
        trainer: the run's.

    Raises:
        ConfigurationError: validation, test or prediction after a fit, without a checkpoint.
    """
    method = strategy._start_method
    if method == "popen" or not megatron_models(module):
        return
    if trainer.state.fn == "fit":
        if strategy.global_rank == 0:
            warnings.warn(
                f"start_method={method!r}: the Megatron-Core model lives in the processes of the ranks, which end with this "
                f"fit, and trainer.save_checkpoint afterwards would save nothing of it; {KEEP}",
                stacklevel=2,
            )
    elif strategy.launcher._already_fit and trainer.ckpt_path is None:
        found = f"ranks started by start_method={method!r}, whose trained Megatron-Core model ended with fit: this one is new"
        remedy = f"{KEEP}; for a model that this trainer has not trained make another Trainer"
        raise_problems(
            [Problem(f"trainer.{trainer.state.fn.value} after trainer.fit, without ckpt_path", found, remedy)]
        )
