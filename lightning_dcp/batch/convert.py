"""Conversions between packed batches, padded dicts and jagged (nested-tensor) dicts; no token is lost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_dcp.batch.masks import padding_mask
from lightning_dcp.batch.packed import PackedBatch, cumulative, token_axis
from lightning_dcp.batch.segments import SEGMENTS
from lightning_dcp.errors import BatchError

PADDING_VALUES: dict[str, int] = {"labels": -100, "shift_labels": -100}
"""What padding holds, by field, where it is not 0."""


def padded_to_packed(batch: Mapping[str, Any], sample_ids: Sequence[int] | None = None) -> PackedBatch:
    """Pack a padded dict: every ``[B, T, ...]`` field loses its padding; ``attention_mask`` becomes the boundaries.

    ``position_ids`` may also be ``[k, B, T]``, which gives ``[k, 1, T]``. ``segments``, one list a row, are kept.

    Raises:
        BatchError: a mask that cannot be read, or a field that is not per-token.
    """
    real = padding_mask(batch)
    fields = {}
    for name, field in batch.items():
        if name in ("attention_mask", SEGMENTS):
            continue
        if isinstance(field, Tensor) and name == "position_ids" and field.shape[1:] == real.shape:
            fields[name] = field[:, real].unsqueeze(1)
            continue
        if not isinstance(field, Tensor) or field.shape[:2] != real.shape:
            raise BatchError(
                f"field {name!r} is not per-token ([{real.shape[0]}, {real.shape[1]}, ...]): cannot be packed"
            )
        fields[name] = field[real].unsqueeze(0)
    lengths = cumulative(real.sum(1).tolist(), real.device)
    return PackedBatch(fields, lengths, sample_ids, batch.get(SEGMENTS))


def packed_to_padded(
    batch: PackedBatch, *, padding_side: Literal["right", "left"] = "right", length: int | None = None
) -> dict[str, Any]:
    """The inverse of :func:`padded_to_packed`: fields ``[B, T, ...]`` and an ``attention_mask`` (int64 ``[B, T]``).

    Segments become a list with one entry a sample, ``segments``.

    Args:
        batch: the packed batch.
        padding_side: where the padding goes.
        length: T; the longest sample by default.
    """
    width = batch.max_seqlen if length is None else length
    if width < batch.max_seqlen:
        raise BatchError(f"length={width} is shorter than the longest sample ({batch.max_seqlen} tokens)")
    lengths = torch.tensor(batch.lengths, device=batch.device).unsqueeze(1)
    columns = torch.arange(width, device=batch.device).unsqueeze(0)
    real = columns < lengths if padding_side == "right" else columns >= width - lengths
    out: dict[str, Any] = {}
    for name, field in batch.fields.items():
        if token_axis(name, field, batch.num_tokens) == 2:
            out[name] = torch.stack([_padded(kind[0], real, 0) for kind in field])
        else:
            out[name] = _padded(field[0], real, PADDING_VALUES.get(name, 0))
    out["attention_mask"] = real.long()
    return out | _segments_of(batch)


def _segments_of(batch: PackedBatch) -> dict[str, Any]:
    return {} if batch.segments is None else {SEGMENTS: list(batch.segments)}


def _padded(tokens: Tensor, real: Tensor, padding: int) -> Tensor:
    """Tokens ``[T, ...]`` at their places in rows, with a value at all others."""
    padded = torch.full((*real.shape, *tokens.shape[1:]), padding, dtype=tokens.dtype, device=tokens.device)
    padded[real] = tokens
    return padded


def is_jagged(value: object) -> bool:
    """Whether a value is a nested tensor of jagged layout, ``[B, (T), ...]``."""
    return isinstance(value, Tensor) and value.is_nested and value.layout == torch.jagged


def jagged_offsets(value: Tensor) -> Tensor:
    """Cumulative lengths of a jagged nested tensor ``[B, (T), ...]``, int64 ``[B + 1]``.

    Raises:
        BatchError: a tensor with gaps between its samples, or whose ragged dimension is not the second.
    """
    if value.lengths() is not None or value._ragged_idx != 1:  # type: ignore[attr-defined]
        raise BatchError(
            "a jagged tensor of a batch must be [B, (T), ...] without gaps between samples (as nested_tensor and "
            "nested_tensor_from_jagged without lengths make it); build it anew from its samples"
        )
    offsets: Tensor = value.offsets()  # type: ignore[attr-defined]
    return offsets


def jagged_to_packed(batch: Mapping[str, Any], sample_ids: Sequence[int] | None = None) -> PackedBatch:
    """Pack a dict whose fields are all jagged nested tensors with the same lengths; its ``segments`` are kept."""
    fields, offsets = {}, None
    for name, field in batch.items():
        if name == SEGMENTS:
            continue
        if not is_jagged(field):
            raise BatchError(f"field {name!r} is not a jagged nested tensor: cannot be packed")
        own = jagged_offsets(field)
        if offsets is not None and not torch.equal(offsets, own):
            raise BatchError(f"field {name!r} has other sample lengths than the fields before it")
        offsets = own
        fields[name] = field.values().unsqueeze(0)
    if offsets is None:
        raise BatchError("a jagged batch needs at least one field")
    return PackedBatch(fields, offsets, sample_ids, batch.get(SEGMENTS))


def packed_to_jagged(batch: PackedBatch) -> dict[str, Any]:
    """The inverse of :func:`jagged_to_packed`: fields as nested tensors ``[B, (T), ...]`` that share their offsets.

    Segments become a list with one entry a sample, ``segments``.

    Raises:
        BatchError: ``position_ids`` of shape ``[k, 1, T]``, which has no jagged form.
    """
    for name, field in batch.fields.items():
        if token_axis(name, field, batch.num_tokens) == 2 and len(field) > 1:
            raise BatchError(
                f"{name} of shape {tuple(field.shape)} has no jagged form: leave it out, or use padded rows"
            )
    offsets = batch.cu_seqlens.long()
    fields = {name: torch.nested.nested_tensor_from_jagged(field[0], offsets) for name, field in batch.fields.items()}
    return fields | _segments_of(batch)
