"""Targets: shifted once, on whole samples, never across the border between two samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from lightning_dcp.batch.convert import is_jagged, jagged_offsets, padding_mask
from lightning_dcp.batch.packed import PackedBatch
from lightning_dcp.errors import BatchError

IGNORE_INDEX = -100
"""The label of a token that is no target, as in Hugging Face and ``torch.nn.functional.cross_entropy``."""

Batch: TypeAlias = PackedBatch | Mapping[str, Tensor]
"""A batch in any of the supported formats: packed, padded dict, jagged dict."""


def shifted_labels(batch: Batch) -> Tensor:
    """The target of each position: the label of the next token of the same sample, -100 where there is none.

    ``shift_labels``, when the batch has it, is already that and is returned as it is. Otherwise ``labels`` (same
    positions as ``input_ids``) are shifted by one inside each sample.

    Returns:
        A tensor of the same shape as ``labels``: ``[1, T]``, ``[B, T]`` or jagged ``[B, (T)]``.

    Raises:
        BatchError: neither or both of ``labels`` and ``shift_labels`` are there.
    """
    if "labels" in batch and "shift_labels" in batch:
        raise BatchError("a batch has both labels and shift_labels: keep one, so that targets are shifted exactly once")
    if "shift_labels" in batch:
        return batch["shift_labels"]
    if "labels" not in batch:
        raise BatchError("a batch has neither labels nor shift_labels: there is nothing to predict")
    return _shift(batch, batch["labels"])


def _shift(batch: Batch, labels: Tensor) -> Tensor:
    if is_jagged(labels):
        packed = _shift_packed(labels.values(), jagged_offsets(labels)[1:])
        return torch.nested.nested_tensor_from_jagged(packed, jagged_offsets(labels))
    if isinstance(batch, PackedBatch):
        return _shift_packed(labels[0], batch.cu_seqlens[1:].long()).unsqueeze(0)
    shifted = torch.full_like(labels, IGNORE_INDEX)
    shifted[:, :-1] = labels[:, 1:]
    real = padding_mask(batch)
    has_next = torch.zeros_like(real)
    has_next[:, :-1] = real[:, :-1] & real[:, 1:]  # both: left padding before a sample must not predict its first token
    return shifted.masked_fill(~has_next, IGNORE_INDEX)


def _shift_packed(labels: Tensor, ends: Tensor) -> Tensor:
    """Shift ``[T]`` labels by one; the last token of each sample (before each of ``ends``) gets no target."""
    shifted = labels.roll(-1)
    shifted[ends[ends > 0] - 1] = IGNORE_INDEX
    return shifted
