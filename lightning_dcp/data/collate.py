"""Collate functions: samples to a packed, a padded or a jagged batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

from torch import Tensor

from lightning_dcp.batch import PackedBatch, packed_to_jagged, packed_to_padded
from lightning_dcp.batch.segments import SEGMENTS

BatchFormat = Literal["packed", "padded", "jagged"]
"""Names of the batch formats."""

Samples = Sequence[Mapping[str, Any]]


def collate_packed(samples: Samples) -> PackedBatch:
    """Samples one after another, without padding; ``sample_ids`` are the samples' ``index`` in their data set.

    Every tensor of a sample is taken as a per-token field ``[L, ...]``. Samples without ``index`` are numbered 0, 1...
    A sample's ``segments``, a list of :class:`~lightning_dcp.segments.Segment`, become those of the batch; if some samples
    have them, the others have none.
    """
    fields = [{n: v for n, v in sample.items() if isinstance(v, Tensor) and n != SEGMENTS} for sample in samples]
    indexed = all("index" in sample for sample in samples)
    ids = [sample["index"] for sample in samples] if indexed else None
    segments = [sample.get(SEGMENTS) for sample in samples] if any(SEGMENTS in s for s in samples) else None
    return PackedBatch.from_samples(fields, ids, segments)


def collate_padded(samples: Samples) -> dict[str, Any]:
    """``[B, T]`` fields padded on the right (``input_ids`` with 0, ``labels`` with -100) and an ``attention_mask``.

    Indices are dropped; ``segments``, where samples have them, are a list with one entry a sample.
    """
    return packed_to_padded(collate_packed(samples))


def collate_jagged(samples: Samples) -> dict[str, Any]:
    """Nested tensors of jagged layout, ``[B, (T)]``; indices and ``segments`` as in :func:`collate_padded`."""
    return packed_to_jagged(collate_packed(samples))


COLLATORS: Mapping[BatchFormat, Callable[[Samples], Any]] = MappingProxyType(
    {"packed": collate_packed, "padded": collate_padded, "jagged": collate_jagged}
)
"""The collate function of each batch format."""
