"""Loss scaling in 16-bit runs whose ranks hold different weights."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim import Optimizer


class SharedGradScaler(ShardedGradScaler):
    """A scaler that skips a step on all ranks if any finds an infinite gradient, for fused optimizers, too.

    torch's own looks at this rank's gradients only, and its sharded one asks the other ranks in :meth:`unscale_` alone. Fused
    optimizers unscale by themselves, and skip the step where they are told 1, and not where they are told how many ranks found
    an infinity.
    """

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide gradients by the scale. Collective over the group."""
        super().unscale_(optimizer)
        for found in self._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values():
            found.clamp_(max=1.0)

    def _check_inf_per_device(self, optimizer: Optimizer) -> dict[str, Any]:
        """What is called in place of :meth:`unscale_` for optimizers that do it by themselves. Collective over the group."""
        every = super()._check_inf_per_device(optimizer)
        for found in every.values():
            anywhere = found.to(self._device)
            dist.all_reduce(anywhere, op=dist.ReduceOp.MAX, group=self.process_group)
            found.copy_(anywhere)
        return every


def share_found_infinities(plugin: Any) -> None:
    """Give a precision plugin a :class:`SharedGradScaler`, over the world.

    Needed where ranks hold parts of a model: some would take the step, and their scales would drift apart. Over the plane
    gradients are summed before, so that what is infinite on one rank is on all. Nothing is done without a scaler, or for one
    of another kind than torch's.

    Args:
        plugin: Lightning's; a plugin with a ``scaler`` is changed in place.
    """
    own = getattr(plugin, "scaler", None)
    if type(own) is not torch.amp.GradScaler or not own.is_enabled():
        return
    plugin.scaler = SharedGradScaler(
        own._device,
        init_scale=own.get_scale(),
        backoff_factor=own.get_backoff_factor(),
        growth_factor=own.get_growth_factor(),
        growth_interval=own.get_growth_interval(),
        process_group=dist.group.WORLD,
    )
