"""The norm of the gradients, logged before they are clipped."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch.optim import Optimizer

from lightning_dcp.errors import Problem, raise_problems


class GradientNorm(Callback):
    """Logs the gradients' norm at each optimizer step, the same number on all ranks, whatever they hold of the model.

    It is that of one process with the whole model and batch, before clipping, and NaN or infinite on all ranks if a gradient
    is on any. Computing it costs one reading of the gradients, and where ranks hold different weights a small collective.

    Args:
        name: what it is logged as.
        norm_type: p of the p-norm; ``inf`` for the largest entry.

    Raises:
        ConfigurationError: a p of 0 or less; at the start, a strategy that cannot tell it.
    """

    def __init__(self, name: str = "grad_norm", norm_type: float = 2.0) -> None:
        self.name, self.norm_type = name, float(norm_type)
        if not self.norm_type > 0:
            raise_problems([Problem(f"norm_type={norm_type!r}", "not above 0", "use 2.0, say, or inf")])

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse strategies of other kinds."""
        if not hasattr(trainer.strategy, "gradient_norm"):
            found = f"Trainer(strategy={type(trainer.strategy).__name__})"
            raise_problems([Problem(type(self).__name__, found, "use DCPStrategy")])

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Log the norm; gradients are clipped after this."""
        strategy: Any = trainer.strategy
        pl_module.log(self.name, strategy.gradient_norm(optimizer, norm_type=self.norm_type))
