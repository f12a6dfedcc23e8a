"""Batches: packed (THD), padded and jagged, and what the scheduler needs to know of each."""

from lightning_dcp.batch.convert import jagged_to_packed, packed_to_jagged, packed_to_padded, padded_to_packed
from lightning_dcp.batch.packed import PackedBatch
from lightning_dcp.batch.segments import BatchSegments, SampleSegments, Segment

__all__ = [
    "BatchSegments",
    "PackedBatch",
    "SampleSegments",
    "Segment",
    "jagged_to_packed",
    "packed_to_jagged",
    "packed_to_padded",
    "padded_to_packed",
]
