"""What rank 0 does for all: its failure is everyone's."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from lightning_dcp.errors import CheckpointError


def on_first_rank(action: Callable[[], object], what: str, group: dist.ProcessGroup) -> None:
    """Run a function on rank 0; the others wait for it. Collective over the world.

    Args:
        action: what to do.
        what: could not be done if it fails, for the message.
        group: a gloo group of the world.

    Raises:
        CheckpointError: it failed; on all ranks, so that none waits for one that has gone.
    """
    failure: Exception | None = None
    if dist.get_rank() == 0:
        try:
            action()
        except Exception as error:
            failure = error
    said: list[str | None] = [None if failure is None else repr(failure)]
    dist.broadcast_object_list(said, 0, group=group)
    if said[0] is not None:
        raise CheckpointError(f"{what}; rank 0: {said[0]}") from failure
