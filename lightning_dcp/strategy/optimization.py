"""From gradients to weights: the norm, clipping, the distributed optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor
from torch.optim import Optimizer

from lightning_dcp.errors import raise_problems
from lightning_dcp.models.megatron.clipping import clip_by_norm, counted, gradient_norm
from lightning_dcp.models.megatron.distributed_optimizer import DistributedOptimizer, distributed_problems
from lightning_dcp.parallel.loss_scale import share_found_infinities
from lightning_dcp.strategy.state import StrategyState


class OptimizationHooks(StrategyState):
    """Hooks of Lightning's between the backward and the next step."""

    def gradient_norm(self, optimizer: Optimizer | None = None, *, norm_type: float = 2.0) -> Tensor:
        """The norm of the step's gradients, as one process has it. Collective over the world where ranks hold different weights.

        For hooks between the backward and the optimizer step, on every rank, such as ``on_before_optimizer_step``, which runs
        before gradients are clipped. ``lightning.pytorch.utilities.grad_norm``, and torch's ``clip_grad_norm_`` called by
        hand, see only what this rank holds: under tensor, pipeline or expert parallelism that is a part.

        Args:
            optimizer: whose parameters to look at; by default all of the module's.
            norm_type: p of the p-norm; ``math.inf`` for the largest entry.

        Returns:
            float64 without dimensions, the same on all ranks; NaN or infinite on all if a gradient is on any.
        """
        module, own = self._module, self._distributed
        parameters = module.parameters() if optimizer is None else self.precision_plugin.main_params(optimizer)
        gradients = counted(parameters, module, self.groups) + ([] if own is None else own.gradients())
        spread = own is not None or self.topology.is_model_parallel
        with self._naming_failures():
            return gradient_norm(gradients, self.clock, device=self.root_device, norm_type=norm_type, spread=spread)

    def _clipped(self, optimizer: Optimizer) -> list[Tensor]:
        """What has the gradients of an optimizer's weights."""
        shares = [] if self._distributed is None else self._distributed.shares()
        return [*self.precision_plugin.main_params(optimizer), *shares]

    def _clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        """In place of the precision plugin's, which knows this rank's gradients only."""
        clip_by_norm(self._clipped(optimizer), clip_val, self.gradient_norm(optimizer))

    def _clip_grad_by_value(self, optimizer: Optimizer, clip_val: float) -> None:
        """In place of the precision plugin's, which does not know where the distributed optimizer has gradients."""
        torch.nn.utils.clip_grad_value_(self._clipped(optimizer), clip_val)

    def _make_distributed(self) -> DistributedOptimizer:
        scaled = getattr(self.precision_plugin, "scaler", None) is not None
        raise_problems(distributed_problems(self._module, self.optimizers, scaled=scaled))
        return DistributedOptimizer(self._module, self.optimizers[0], self.groups, self.root_device)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """As in Lightning; the distributed optimizer updates the weights that it holds after the others."""
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        if self._distributed is not None:
            with self._naming_failures():
                self._distributed.step()
        return output

    def setup_precision_plugin(self) -> None:
        """Make the plugin clip by the norm over all ranks (unless it has its own way), and skip steps on all ranks or none."""
        super().setup_precision_plugin()
        plugin: Any = self.precision_plugin
        if type(plugin).clip_grad_by_norm is Precision.clip_grad_by_norm:
            plugin.clip_grad_by_norm = self._clip_grad_by_norm
        if type(plugin).clip_grad_by_value is Precision.clip_grad_by_value:
            plugin.clip_grad_by_value = self._clip_grad_by_value
        if self.topology.is_model_parallel:
            share_found_infinities(plugin)
