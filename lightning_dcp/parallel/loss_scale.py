"""Loss scaling in 16-bit runs whose ranks hold different weights."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer


class SharedGradScaler(torch.amp.GradScaler):
    """A scaler that skips a step on all ranks if any finds an infinite gradient, for fused optimizers, too.

    torch's own looks at this rank's gradients only. Its sharded one adds up over ranks what they find, and not for fused
    optimizers, which unscale by themselves; these skip a step where they are told 1, and take it where they are told 2.
    """

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide gradients by the scale. Collective over the world."""
        super().unscale_(optimizer)
        self._share(optimizer)

    def _check_inf_per_device(self, optimizer: Optimizer) -> dict[str, Any]:
        """What torch calls in place of :meth:`unscale_` for optimizers that do it by themselves. Collective over the world."""
        super()._check_inf_per_device(optimizer)
        return self._share(optimizer)

    def _share(self, optimizer: Optimizer) -> dict[Any, Any]:
        """Make what was found here 1 if any rank found an infinity, else 0; a rank may have no gradients to look at."""
        found: dict[Any, Any] = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        scale, _ = self._check_scale_growth_tracker("unscale_")
        anywhere = torch.zeros((), device=scale.device)
        for own in found.values():
            anywhere = torch.maximum(anywhere, own.to(scale.device))
        dist.all_reduce(anywhere, op=dist.ReduceOp.MAX)
        found.clear()
        found[scale.device] = anywhere
        return found


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
    )
