"""The view of any batch: what the scheduler and the regions need to know of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lightning_dcp.batch.base import BatchView
from lightning_dcp.batch.boundaries import flattened_lengths
from lightning_dcp.batch.convert import is_jagged
from lightning_dcp.batch.families import FamiliesView, family_prefixes
from lightning_dcp.batch.flattened import FlattenedView
from lightning_dcp.batch.packed import PackedBatch
from lightning_dcp.batch.sequences import SequenceView
from lightning_dcp.batch.single import JaggedView, PackedView, PaddedView
from lightning_dcp.errors import BatchError

__all__ = [
    "BatchView",
    "FamiliesView",
    "FlattenedView",
    "JaggedView",
    "PackedView",
    "PaddedView",
    "SequenceView",
    "view",
]


def view(batch: Any) -> BatchView:
    """The view of a batch in any supported format.

    Raises:
        BatchError: an unknown format, or a batch that breaks the rules of its format.
    """
    if isinstance(batch, PackedBatch):
        return PackedView(batch)
    if isinstance(batch, Mapping):
        if family_prefixes(batch):
            return FamiliesView(batch, lambda prefix, fields: view(fields))
        lengths = flattened_lengths(batch)
        if lengths is not None:
            return FlattenedView(batch, lengths)
        if any(is_jagged(value) for value in batch.values()):
            return JaggedView(batch)
        if isinstance(batch.get("input_ids"), Tensor):
            return PaddedView(batch)
    found = f"a mapping with keys {sorted(map(str, batch))}" if isinstance(batch, Mapping) else type(batch).__name__
    raise BatchError(
        f"unknown batch format: found {found}. Supported: a PackedBatch; a dict with input_ids [B, T] and attention_mask "
        "[B, T], or chosen_input_ids, rejected_input_ids, ... and a mask for each; a dict with input_ids [1, T] and "
        "cu_seq_lens_q or position_ids that begin again with each sample; a dict of jagged nested tensors. "
        "Change the collate function (lightning_dcp.data has one for each)."
    )
