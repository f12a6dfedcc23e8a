"""The weight of a pack's loss in the step's objective. Nothing else scales a loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from lightning_dcp.errors import BatchError
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


def shard_weight(normalization: LossNormalization, targets: int, batch_targets: int) -> float:
    """The factor of one rank's part of a pack's loss, with sharded outputs; the parts of a pack add up to its share.

    Args:
        normalization: ``tokens`` or ``sum``; a mean over samples has no parts.
        targets: targets among this rank's tokens.
        batch_targets: targets of the whole batch.

    Raises:
        BatchError: a mean over samples.
    """
    if normalization == "samples":
        raise BatchError("a mean over samples cannot be added up from parts of samples: use outputs='gathered'")
    if normalization == "sum":
        return 1.0
    return targets / batch_targets if batch_targets else 0.0


def backward_scale(weight: float, copies: int, accumulate_grad_batches: int) -> float:
    """The factor of a loss before backward.

    Args:
        weight: the loss's share of the step's objective.
        copies: ranks that hold this same loss. Gathered outputs give it to each of the c ranks of a group, hence 1/c
            (:mod:`lightning_dcp.parallel.shard` has the whole argument); sharded ones give each rank a part of its own.
        accumulate_grad_batches: Lightning's accumulation is the mean over batches.
    """
    return weight / copies / accumulate_grad_batches
