"""Views of batches whose samples are one sequence each: packed, padded and jagged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from lightning_dcp.batch.base import BatchView
from lightning_dcp.batch.boundaries import refuse_restarts
from lightning_dcp.batch.convert import is_jagged, jagged_offsets
from lightning_dcp.batch.fields import like, sample_ids, select_jagged, select_samples
from lightning_dcp.batch.masks import padding_mask, real_tokens
from lightning_dcp.batch.packed import PackedBatch, cumulative
from lightning_dcp.batch.sequences import JaggedSequences, PackedSequences, PaddedSequences, SequenceView, read_rows
from lightning_dcp.errors import BatchError


class PackedView(BatchView):
    """A :class:`PackedBatch`; per-token tensors are ``[1, T, ...]``."""

    def __init__(self, batch: PackedBatch) -> None:
        self.batch, self.lengths, self.sample_ids = batch, batch.lengths, batch.sample_ids
        self.tokens: PackedSequences = PackedSequences(batch.lengths)

    def select(self, indices: Sequence[int]) -> PackedBatch:  # noqa: D102
        return self.batch.select(indices)

    def reread(self, selected: Any, indices: Sequence[int]) -> PackedView:  # noqa: D102
        return PackedView(selected)

    def sequences(self, value: Tensor, attention_mask: object = None) -> SequenceView | None:
        """The batch's own sequences, for tensors ``[1, T, ...]``; its boundaries win over any mask."""
        return self.tokens if self.tokens.per_token(value) else None


class PaddedView(BatchView):
    """A mapping with ``input_ids [B, T]`` and (unless every row is full) ``attention_mask [B, T]``."""

    def __init__(self, batch: Mapping[str, Any]) -> None:
        self.batch = batch
        self.tokens: PaddedSequences = PaddedSequences(padding_mask(batch))
        refuse_restarts(batch)
        self.lengths = self.tokens.lengths
        self.sample_ids = sample_ids(batch, len(self.lengths))

    @property
    def mask(self) -> Tensor:
        """Real tokens, bool ``[B, T]``."""
        return self.tokens.mask

    def width(self, indices: Sequence[int]) -> int:
        """Columns up to the last that is not padding in all of these rows; at least one, where there is one."""
        columns = self.mask[list(indices)].any(0).nonzero().squeeze(1)
        return int(columns[-1]) + 1 if len(columns) else min(1, self.mask.shape[1])

    def select(self, indices: Sequence[int]) -> Any:
        """Rows at these indices, without the trailing columns that are padding in all of them.

        Leading columns stay, so that what a step returns for left-padded rows lies where it would have without a cut.
        ``position_ids`` may also be ``[k, B, T]``.
        """
        return self.cut(indices, self.width(indices))

    def reread(self, selected: Any, indices: Sequence[int]) -> PaddedView:  # noqa: D102
        return PaddedView(selected)

    def cut(self, indices: Sequence[int], width: int) -> Any:
        """Rows at these indices, and the first ``width`` columns."""
        return like(self.batch, {n: self._cut(n, value, indices, width) for n, value in self.batch.items()})

    def _cut(self, name: str, value: Any, indices: Sequence[int], width: int) -> Any:
        if isinstance(value, Tensor) and name == "position_ids" and self.tokens.leading(value) == 1:
            return value[:, list(indices), :width]
        if isinstance(value, Tensor) and self.tokens.per_token(value):
            return value[list(indices), :width]
        return select_samples(value, indices, len(self.lengths))

    def sequences(self, value: Tensor, attention_mask: object = None) -> SequenceView | None:
        """A tensor of the batch's shape holds the batch's own sequences, any other ``[N, T', ...]`` is read by itself.

        A mask of the call that has zeros is followed; one of ones only does not change which tokens of the batch are
        real. Tensors of another shape hold the real tokens of the call's mask. Without one, columns of a field of the batch
        (``input_ids[:, :-1]``) hold what is real in these columns, and any other tensor full rows. A jagged tensor is read
        by its own offsets.
        """
        if not self.tokens.per_token(value):
            columns = self._columns(value) if attention_mask is None else None
            return read_rows(value, attention_mask) if columns is None else PaddedSequences(self.mask[:, columns])
        if attention_mask is None or attention_mask is self.batch.get("attention_mask"):
            return self.tokens
        given = PaddedSequences(real_tokens(attention_mask, value))
        return self.tokens if bool(given.mask.all()) else given

    def _columns(self, value: Tensor) -> slice | None:
        """Which columns of a field of the batch a tensor is, if it shares the field's memory."""
        for field in self.batch.values():
            if not isinstance(field, Tensor) or not self.tokens.per_token(field) or not same_memory(value, field):
                continue
            start, rest = divmod(int(value.storage_offset()) - int(field.storage_offset()), int(field.stride(1)))
            if rest == 0 and start >= 0 and start + value.shape[1] <= field.shape[1]:
                return slice(start, start + value.shape[1])
        return None


def same_memory(value: Tensor, field: Tensor) -> bool:
    """Whether a tensor is made of the memory of a field, row by row, so that it can only be some of its columns."""
    plain = not value.is_nested and value.dim() == field.dim() and value.numel() > 0
    return (
        plain
        and value.untyped_storage().data_ptr() == field.untyped_storage().data_ptr()
        and (value.stride(), value.dtype, value.shape[0]) == (field.stride(), field.dtype, field.shape[0])
    )


class JaggedView(BatchView):
    """A mapping of nested tensors of jagged layout, ``[B, (T), ...]``, that share their lengths."""

    def __init__(self, batch: Mapping[str, Any]) -> None:
        self.batch = batch
        first = next(value for value in batch.values() if is_jagged(value))
        self.tokens: JaggedSequences = JaggedSequences(jagged_offsets(first))
        self.lengths = self.tokens.lengths
        self.sample_ids = sample_ids(batch, len(self.lengths))
        for name, value in batch.items():
            if is_jagged(value) and not self.tokens.per_token(value):
                raise BatchError(f"jagged field {name!r} has other sample lengths than the first jagged field")

    def select(self, indices: Sequence[int]) -> Any:  # noqa: D102
        offsets = cumulative([self.lengths[i] for i in indices], self.tokens.offsets.device).long()
        return like(self.batch, {name: self._cut(value, indices, offsets) for name, value in self.batch.items()})

    def reread(self, selected: Any, indices: Sequence[int]) -> JaggedView:  # noqa: D102
        return JaggedView(selected)

    def _cut(self, value: Any, indices: Sequence[int], offsets: Tensor) -> Any:
        if is_jagged(value):
            return select_jagged(value, indices, offsets)
        return select_samples(value, indices, len(self.lengths))

    def sequences(self, value: Tensor, attention_mask: object = None) -> SequenceView | None:
        """Jagged tensors hold the sequences of their offsets; any other ``[N, T', ...]`` is read by the call's mask."""
        return self.tokens if self.tokens.per_token(value) else read_rows(value, attention_mask)
