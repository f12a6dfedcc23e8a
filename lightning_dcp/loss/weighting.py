"""The weight of a pack's loss in the step's objective. Nothing else scales a loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from lightning_dcp.schedule.plan import Pack

LossNormalization = Literal["tokens", "samples", "sum"]
"""What the user's loss is over one batch.

- ``tokens``: a mean over targets (the usual ``cross_entropy``); a pack counts with its share of the batch's targets.
- ``samples``: a mean over samples; a pack counts with its share of the batch's samples.
- ``sum``: a sum; packs add up.
"""


def pack_weight(normalization: LossNormalization, pack: Pack, targets: Sequence[int]) -> float:
    """The factor of a pack's loss, so that the packs of a batch add up to the loss of the whole batch.

    Args:
        normalization: what the user's loss is over one batch.
        pack: the pack.
        targets: targets of each sample of the whole batch, over all ranks.

    Returns:
        A share of 1 (``tokens``, ``samples``) or 1 (``sum``). A pack without targets has weight 0 under ``tokens``.
    """
    if normalization == "sum":
        return 1.0
    if normalization == "samples":
        return len(pack.samples) / len(targets)
    total = sum(targets)
    return sum(targets[s] for s in pack.samples) / total if total else 0.0


def backward_scale(weight: float, cp_size: int, accumulate_grad_batches: int) -> float:
    """The factor of a pack's loss on each rank of its group before backward.

    Each of the c ranks holds the same loss, hence 1/c (:mod:`lightning_dcp.parallel.shard` has the whole argument).
    Lightning's accumulation is the mean over batches, hence the last factor.
    """
    return weight / cp_size / accumulate_grad_batches
