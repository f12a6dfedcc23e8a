"""Loss scaling in 16-bit runs whose ranks hold different weights."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler


def share_found_infinities(plugin: Any) -> None:
    """Give a precision plugin a scaler that skips a step on all ranks if any finds an infinite gradient.

    torch's own looks at this rank's gradients only: where ranks hold parts of a model, some would take the step, and their
    scales would drift apart. Nothing is done without a scaler, or for one of another kind than torch's.

    Args:
        plugin: Lightning's; a plugin with a ``scaler`` is changed in place.
    """
    own = getattr(plugin, "scaler", None)
    if type(own) is not torch.amp.GradScaler:
        return
    plugin.scaler = ShardedGradScaler(
        own._device,
        init_scale=own.get_scale(),
        backoff_factor=own.get_backoff_factor(),
        growth_factor=own.get_growth_factor(),
        growth_interval=own.get_growth_interval(),
        enabled=own.is_enabled(),
        process_group=dist.group.WORLD,
    )
