"""What a token-mean loss divides by: the targets of each sample."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_dcp.batch.sequences import IGNORE_INDEX, SequenceView
from lightning_dcp.errors import BatchError

TARGETS = ("labels", "shift_labels", "loss_mask")
"""Fields that say which tokens are targets."""


def count_targets(batch: Any, tokens: SequenceView) -> tuple[int, ...]:
    """Targets of each sample of a batch whose samples are one sequence each.

    Args:
        batch: a mapping, or a packed batch.
        tokens: how its per-token fields lie.

    Raises:
        BatchError: more than one of these fields, one that is not per-token, labels of padding that are not -100, or a mask
            with other values than 0 and 1.
    """
    if "labels" in batch and per_sample(batch["labels"], len(tokens.lengths)):
        return count_sample_targets(batch["labels"])
    for name in TARGETS:
        if name in batch:
            _check(name, batch[name], tokens)
    refuse_both(batch)
    labelled = "labels" in batch or "shift_labels" in batch
    if labelled and "loss_mask" in batch:
        raise BatchError(
            "a batch has labels and a loss_mask: it is not known which of them the loss is a mean over. Put -100 into "
            "the labels where the mask is 0 and leave the mask out, or use loss_normalization='samples' or 'sum'"
        )
    if labelled:
        name = "shift_labels" if "shift_labels" in batch else "labels"
        tokens.refuse_padding_targets(batch[name], name)
        shifted = batch["shift_labels"] if "shift_labels" in batch else tokens.shifted(batch["labels"])
        return tokens.counts(shifted != IGNORE_INDEX)
    if "loss_mask" in batch:
        return tokens.counts(_zeros_and_ones(batch["loss_mask"]))
    return tuple(max(length - 1, 0) for length in tokens.lengths)


def count_sample_targets(labels: Tensor) -> tuple[int, ...]:
    """Targets of each sample where labels are one a sample, ``[S]``: 1, or 0 where the label is -100."""
    return tuple((labels != IGNORE_INDEX).long().tolist())


def refuse_both(batch: Any) -> None:
    """Raise :class:`BatchError` for a batch with labels both as they are and shifted."""
    if "labels" in batch and "shift_labels" in batch:
        raise BatchError("a batch has both labels and shift_labels: keep one, so that targets are shifted exactly once")


def per_sample(value: object, samples: int) -> bool:
    """Whether a value is a tensor of one entry a sample, ``[S]``."""
    return isinstance(value, Tensor) and not value.is_nested and tuple(value.shape) == (samples,)


def _zeros_and_ones(mask: Tensor) -> Tensor:
    plain = mask.values() if mask.is_nested else mask
    if bool(((plain != 0) & (plain != 1)).any()):
        raise BatchError("loss_mask holds values other than 0 and 1: use loss_normalization='samples' or 'sum'")
    return mask != 0


def _check(name: str, value: object, tokens: SequenceView) -> None:
    if not isinstance(value, Tensor) or not tokens.per_token(value):
        found = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise BatchError(f"{name} must hold one entry a token, {tokens.shape_name}; found {found}")
