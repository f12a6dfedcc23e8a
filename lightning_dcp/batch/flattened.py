"""The view of a mapping whose samples lie one after another in one row, as DataCollatorWithFlattening makes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_dcp.batch.base import BatchView
from lightning_dcp.batch.boundaries import CUMULATIVE, LONGEST, NUMBERS
from lightning_dcp.batch.fields import like, sample_ids, select_samples
from lightning_dcp.batch.packed import cumulative, cut_tokens, spans_of
from lightning_dcp.batch.sequences import PackedSequences, SequenceView
from lightning_dcp.errors import BatchError


class FlattenedView(BatchView):
    """A mapping with ``input_ids [1, T]`` of several samples; boundaries win over any mask.

    Args:
        batch: the mapping; ``attention_mask``, where it has one, is ``[1, T]``.
        lengths: tokens of each sample, as :func:`~lightning_dcp.batch.boundaries.flattened_lengths` reads them.

    Raises:
        BatchError: a mask of another shape.
    """

    def __init__(self, batch: Mapping[str, Any], lengths: Sequence[int]) -> None:
        self.batch, self.lengths = batch, tuple(lengths)
        self.tokens: PackedSequences = PackedSequences(self.lengths)
        self.sample_ids = sample_ids(batch, len(self.lengths))
        mask = batch.get("attention_mask")
        if mask is not None and not (isinstance(mask, Tensor) and self.tokens.per_token(mask)):
            raise BatchError(
                f"attention_mask of a flattened batch must be {self.tokens.shape_name}; its boundaries keep samples apart, so "
                "leave the mask out"
            )

    def select(self, indices: Sequence[int]) -> Any:
        """Samples at these indices in one row, with cumulative lengths, ``max_length_q`` and ``seq_idx`` made anew."""
        lengths = [self.lengths[i] for i in indices]
        spans = spans_of(self.lengths, indices)
        values = {}
        for name, value in self.batch.items():
            made = _boundary_field(name, value, lengths)
            values[name] = self._cut(name, value, indices, spans) if made is None else made
        return like(self.batch, values)

    def reread(self, selected: Any, indices: Sequence[int]) -> FlattenedView:  # noqa: D102
        return FlattenedView(selected, [self.lengths[i] for i in indices])

    def _cut(self, name: str, value: Any, indices: Sequence[int], spans: Sequence[slice]) -> Any:
        if isinstance(value, Tensor) and name == "position_ids" and self.tokens.leading(value) == 1:
            return cut_tokens(value, spans, 2)
        if isinstance(value, Tensor) and self.tokens.per_token(value):
            return cut_tokens(value, spans, 1)
        return select_samples(value, indices, len(self.lengths))

    def sequences(self, value: Tensor, attention_mask: object = None) -> SequenceView | None:
        """The batch's own sequences, for tensors ``[1, T, ...]``; its boundaries win over any mask."""
        return self.tokens if self.tokens.per_token(value) else None


def _boundary_field(name: str, value: Any, lengths: Sequence[int]) -> Any:
    """A field that says where samples lie, for samples of these lengths; ``None`` if it is no such field."""
    if name in CUMULATIVE:
        ends = cumulative(lengths)
        return ends.to(value) if isinstance(value, Tensor) else type(value)(ends.tolist())
    if name in LONGEST and value is not None:
        return torch.full_like(value, max(lengths)) if isinstance(value, Tensor) else max(lengths)
    if name == NUMBERS and isinstance(value, Tensor):
        numbers = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        return numbers.to(value).reshape(1, -1)
    return None
