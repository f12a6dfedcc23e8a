"""What the scheduler and the regions need to know of a batch, whatever its format."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lightning_dcp.batch.packed import PackedBatch
from lightning_dcp.batch.segments import SEGMENTS, BatchSegments, as_batch_segments, segments_checksum
from lightning_dcp.batch.sequences import PackedSequences, SequenceView
from lightning_dcp.batch.targets import count_targets
from lightning_dcp.errors import BatchError


class BatchView(ABC):
    """A batch seen as samples of known lengths, which can be cut out of it.

    Attributes:
        batch: the user's batch, in the user's format.
        lengths: tokens of each sample, all its sequences together.
        sample_ids: a name for each sample, used in errors.
        tokens: how the batch's per-token fields lie; ``None`` where a sample has several sequences.
    """

    batch: Any
    lengths: tuple[int, ...]
    sample_ids: tuple[int, ...]
    tokens: SequenceView | None

    @abstractmethod
    def select(self, indices: Sequence[int]) -> Any:
        """The same kind of batch with only these samples, whole and in this order."""

    def part(self, indices: Sequence[int]) -> BatchView:
        """The view of :meth:`select`: of the same kind, whatever the cut batch looks like by itself."""
        return self.reread(self.select(indices), indices)

    @abstractmethod
    def reread(self, selected: Any, indices: Sequence[int]) -> BatchView:
        """A view of this kind of what was selected at these indices."""

    @abstractmethod
    def sequences(self, value: Tensor, attention_mask: object = None) -> SequenceView | None:
        """Which sequences a tensor holds that is handed to a model, which need not be a field of the batch.

        Args:
            value: what the model is called with.
            attention_mask: the mask of that call, if it has one.

        Returns:
            How the tensor lies; ``None`` if it does not hold one entry a token in any known way.

        Raises:
            BatchError: a mask that cannot be read, or a tensor that can be read in more than one way.
        """

    @cached_property
    def segments(self) -> BatchSegments | None:
        """The segments of each sample, from the batch's ``segments``; ``None`` if it has none.

        Raises:
            BatchError: segments that do not fit the samples, or of samples that have several sequences each.
        """
        given = self.batch.segments if isinstance(self.batch, PackedBatch) else self.batch.get(SEGMENTS)
        return as_batch_segments(given, self.lengths, self.sample_ids)

    def check(self) -> None:
        """Raise :class:`BatchError` for an empty batch, an empty sample, or segments that cannot be read."""
        if not self.lengths:
            raise BatchError("the batch holds no sample")
        empty = [name for name, length in zip(self.sample_ids, self.lengths, strict=True) if length == 0]
        if empty:
            raise BatchError(
                f"empty sample(s) {empty}: every sample needs at least one token; leave them out of the data"
            )
        _ = self.segments  # read, so that what is wrong with them is found before a plan is made

    def target_counts(self) -> tuple[int, ...]:
        """Targets of each sample: what a token-mean loss divides by.

        Labels that count after the shift (so never a sequence's first token); without labels the ``loss_mask``;
        without either, every token but a sequence's last, which has nothing to predict. One label a sample (``[S]``, as
        classifiers and reward models have) is one target.

        Raises:
            BatchError: more than one of these fields, one that is not per-token, or a mask with other values than 0 and 1.
        """
        return count_targets(self.batch, self._one_layout())

    def fingerprint(self) -> int:
        """A checksum over all tensors and segments of the batch: equal on ranks that read the same batch."""
        checksum = 0
        for value in _tensors(self.batch):
            plain = (value.values() if value.is_nested else value).detach().cpu().contiguous()
            checksum = zlib.crc32(plain.reshape(-1).view(torch.uint8).numpy().tobytes(), checksum)
        return segments_checksum(self.segments, checksum)

    @property
    def packed(self) -> bool:
        """Whether per-token tensors are ``[1, T, ...]``, all samples one after another."""
        return isinstance(self.tokens, PackedSequences)

    def per_token(self, value: Tensor) -> bool:
        """Whether a tensor holds one entry a token, in the shape of the batch's own fields."""
        return self._one_layout().per_token(value)

    def flatten(self, value: Tensor) -> Tensor:
        """A per-token tensor of the batch's shape as ``[T, ...]``."""
        return self._one_layout().flatten(value)

    def unflatten(self, packed: Tensor) -> Tensor:
        """The inverse of :meth:`flatten` (padding, where the format has it, becomes 0)."""
        return self._one_layout().unflatten(packed)

    @property
    def shape_name(self) -> str:
        """The shape of a per-token field, for error messages."""
        return self._one_layout().shape_name

    def _one_layout(self) -> SequenceView:
        if self.tokens is None:
            raise BatchError(
                "the samples of this batch have several sequences each: it has no one shape of a per-token tensor. Use "
                "a batch with input_ids"
            )
        return self.tokens


def _tensors(batch: PackedBatch | Mapping[str, Any]) -> list[Tensor]:
    fields = batch.fields if isinstance(batch, PackedBatch) else batch
    return [value for value in fields.values() if isinstance(value, Tensor)]
