"""Targets: shifted once, on whole samples, never across the border between two samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from torch import Tensor

from lightning_dcp.batch.convert import is_jagged
from lightning_dcp.batch.packed import PackedBatch
from lightning_dcp.batch.sequences import IGNORE_INDEX, SequenceView, read_rows, shift_packed
from lightning_dcp.batch.sharded import ShardedBatch
from lightning_dcp.batch.targets import refuse_both
from lightning_dcp.batch.view import view
from lightning_dcp.errors import BatchError

__all__ = ["IGNORE_INDEX", "Batch", "shift_packed", "shifted_labels"]

Batch: TypeAlias = PackedBatch | Mapping[str, Tensor]
"""A batch in any of the supported formats: packed, padded dict, jagged dict, flattened dict."""


def shifted_labels(batch: Batch) -> Tensor:
    """The target of each position: the label of the next token of the same sample, -100 where there is none.

    ``shift_labels``, when the batch has it, is already that and is returned as it is. Otherwise ``labels`` (same
    positions as ``input_ids``) are shifted by one inside each sample.

    Returns:
        A tensor of the same shape as ``labels``: ``[1, T]``, ``[B, T]`` or jagged ``[B, (T)]``.

    Raises:
        BatchError: neither or both of ``labels`` and ``shift_labels`` are there, or labels that are not per-token.
    """
    if not isinstance(batch, ShardedBatch):  # which has both, as labels cannot be shifted there
        refuse_both(batch)
    if "shift_labels" in batch:
        return batch["shift_labels"]
    if "labels" not in batch:
        raise BatchError("a batch has neither labels nor shift_labels: there is nothing to predict")
    labels = batch["labels"]
    tokens: SequenceView | None = read_rows(labels) if is_jagged(labels) else view(batch).tokens
    if tokens is None:
        raise BatchError("labels without input_ids of their own: the samples of this batch have several sequences each")
    return tokens.shifted(labels)
