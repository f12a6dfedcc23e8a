"""What the scheduler and the regions need to know of a batch, whatever its format."""

from __future__ import annotations

import copy
import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_dcp.batch.convert import is_jagged, jagged_offsets, padding_mask
from lightning_dcp.batch.labels import IGNORE_INDEX, shifted_labels
from lightning_dcp.batch.packed import PackedBatch, cumulative
from lightning_dcp.errors import BatchError


class BatchView(ABC):
    """A batch seen as samples of known lengths, with the maths to pack its tokens and put them back.

    Attributes:
        batch: the user's batch, in the user's format.
        lengths: tokens of each sample.
        sample_ids: a name for each sample, used in errors.
    """

    batch: Any
    lengths: tuple[int, ...]
    sample_ids: tuple[int, ...]

    @abstractmethod
    def select(self, indices: Sequence[int]) -> Any:
        """The same kind of batch with only these samples, whole and in this order."""

    @abstractmethod
    def per_token(self, value: Tensor) -> bool:
        """Whether a tensor holds one entry a token, in this format's shape."""

    @abstractmethod
    def flatten(self, value: Tensor) -> Tensor:
        """A per-token tensor as ``[T, ...]``: the pack's tokens, sample after sample, without padding."""

    @abstractmethod
    def unflatten(self, packed: Tensor) -> Tensor:
        """The inverse of :meth:`flatten` (padding, where the format has it, becomes 0)."""

    @property
    @abstractmethod
    def shape_name(self) -> str:
        """The shape of a per-token tensor, for error messages."""

    @abstractmethod
    def _token_counts(self, mask: Tensor) -> Tensor:
        """How many entries of a per-token bool tensor are true in each sample, ``[S]``."""

    def check(self) -> None:
        """Raise :class:`BatchError` for an empty batch or an empty sample."""
        if not self.lengths:
            raise BatchError("the batch holds no sample")
        empty = [name for name, length in zip(self.sample_ids, self.lengths, strict=True) if length == 0]
        if empty:
            raise BatchError(
                f"empty sample(s) {empty}: every sample needs at least one token; leave them out of the data"
            )

    def target_counts(self) -> tuple[int, ...]:
        """Targets of each sample: what a token-mean loss divides by.

        Labels that count after the shift (so never a sample's first token); without labels the ``loss_mask``;
        without either, every token but a sample's last, which has nothing to predict. One label a sample (``[S]``, as
        classifiers and reward models have) is one target.

        Raises:
            BatchError: more than one of these fields, one that is not per-token, or a mask with other values than 0 and 1.
        """
        if "labels" in self.batch and self._per_sample(self.batch["labels"]):
            return tuple((self.batch["labels"] != IGNORE_INDEX).long().tolist())
        for name in ("labels", "shift_labels", "loss_mask"):
            if name in self.batch:
                self._check_targets(name, self.batch[name])
        labelled = "labels" in self.batch or "shift_labels" in self.batch
        if labelled and "loss_mask" in self.batch:
            raise BatchError(
                "a batch has labels and a loss_mask: it is not known which of them the loss is a mean over. Put -100 into "
                "the labels where the mask is 0 and leave the mask out, or use loss_normalization='samples' or 'sum'"
            )
        if labelled:
            return tuple(self._token_counts(shifted_labels(self.batch) != IGNORE_INDEX).tolist())
        if "loss_mask" in self.batch:
            mask = self.batch["loss_mask"]
            plain = mask.values() if mask.is_nested else mask
            if bool(((plain != 0) & (plain != 1)).any()):
                raise BatchError("loss_mask holds values other than 0 and 1: use loss_normalization='samples' or 'sum'")
            return tuple(self._token_counts(mask != 0).tolist())
        return tuple(max(length - 1, 0) for length in self.lengths)

    def _per_sample(self, value: object) -> bool:
        return isinstance(value, Tensor) and not value.is_nested and tuple(value.shape) == (len(self.lengths),)

    def _check_targets(self, name: str, value: object) -> None:
        if not isinstance(value, Tensor) or not self.per_token(value):
            found = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise BatchError(f"{name} must hold one entry a token, {self.shape_name}; found {found}")

    def fingerprint(self) -> int:
        """A checksum over all tensors of the batch: equal on ranks that read the same batch."""
        checksum = 0
        for value in _tensors(self.batch):
            plain = (value.values() if value.is_nested else value).detach().cpu().contiguous()
            checksum = zlib.crc32(plain.reshape(-1).view(torch.uint8).numpy().tobytes(), checksum)
        return checksum


def _tensors(batch: PackedBatch | Mapping[str, Any]) -> list[Tensor]:
    fields = batch.fields if isinstance(batch, PackedBatch) else batch
    return [value for value in fields.values() if isinstance(value, Tensor)]


class PackedView(BatchView):
    """A :class:`PackedBatch`; per-token tensors are ``[1, T, ...]``."""

    def __init__(self, batch: PackedBatch) -> None:
        self.batch, self.lengths, self.sample_ids = batch, batch.lengths, batch.sample_ids

    def select(self, indices: Sequence[int]) -> PackedBatch:  # noqa: D102
        return self.batch.select(indices)

    def per_token(self, value: Tensor) -> bool:  # noqa: D102
        return tuple(value.shape[:2]) == (1, sum(self.lengths))

    def flatten(self, value: Tensor) -> Tensor:  # noqa: D102
        return value[0]

    def unflatten(self, packed: Tensor) -> Tensor:  # noqa: D102
        return packed.unsqueeze(0)

    @property
    def shape_name(self) -> str:  # noqa: D102
        return f"[1, {sum(self.lengths)}, ...]"

    def _token_counts(self, mask: Tensor) -> Tensor:
        return torch.stack([part.sum() for part in mask[0].split(list(self.lengths))])


class PaddedView(BatchView):
    """A mapping with ``input_ids [B, T]`` and (unless every row is full) ``attention_mask [B, T]``."""

    def __init__(self, batch: Mapping[str, Any]) -> None:
        self.batch = batch
        self.mask = padding_mask(batch)
        self.lengths = tuple(self.mask.sum(1).tolist())
        self.sample_ids = _sample_ids(batch, len(self.lengths))
        self._real = self.mask.flatten().nonzero().squeeze(1)

    def select(self, indices: Sequence[int]) -> dict[str, Any]:
        """Rows at these indices, without the trailing columns that are padding in all of them.

        Leading columns stay, so that what a step returns for left-padded rows lies where it would have without a cut.
        """
        rows = torch.tensor(list(indices), device=self.mask.device)
        columns = self.mask[rows].any(0).nonzero().squeeze(1)
        span = slice(0, int(columns[-1]) + 1)
        return _like(self.batch, {name: self._select_value(value, rows, span) for name, value in self.batch.items()})

    def _select_value(self, value: Any, rows: Tensor, span: slice) -> Any:
        if isinstance(value, Tensor) and self.per_token(value):
            return value[rows][:, span]
        return _select_samples(value, rows, len(self.lengths))

    def per_token(self, value: Tensor) -> bool:  # noqa: D102
        return value.shape[:2] == self.mask.shape

    def flatten(self, value: Tensor) -> Tensor:  # noqa: D102
        return value.flatten(0, 1).index_select(0, self._real)

    def unflatten(self, packed: Tensor) -> Tensor:  # noqa: D102
        padded = packed.new_zeros((self.mask.numel(), *packed.shape[1:]))
        return padded.index_copy(0, self._real, packed).unflatten(0, self.mask.shape)

    @property
    def shape_name(self) -> str:  # noqa: D102
        return f"[{self.mask.shape[0]}, {self.mask.shape[1]}, ...]"

    def _token_counts(self, mask: Tensor) -> Tensor:
        return (mask & self.mask).sum(1)


class JaggedView(BatchView):
    """A mapping of nested tensors of jagged layout, ``[B, (T), ...]``, that share their lengths."""

    def __init__(self, batch: Mapping[str, Any]) -> None:
        self.batch = batch
        self._offsets = jagged_offsets(self._primary_jagged())
        self.lengths = tuple(torch.diff(self._offsets).tolist())
        self.sample_ids = _sample_ids(batch, len(self.lengths))
        for name, value in batch.items():
            if is_jagged(value) and not self.per_token(value):
                raise BatchError(f"jagged field {name!r} has other sample lengths than the first jagged field")

    def _primary_jagged(self) -> Tensor:
        return next(value for value in self.batch.values() if is_jagged(value))

    def select(self, indices: Sequence[int]) -> dict[str, Any]:  # noqa: D102
        rows = torch.tensor(list(indices), device=self._offsets.device)
        offsets = cumulative([self.lengths[i] for i in indices], self._offsets.device).long()
        return _like(self.batch, {name: self._select_value(value, rows, offsets) for name, value in self.batch.items()})

    def _select_value(self, value: Any, rows: Tensor, offsets: Tensor) -> Any:
        if is_jagged(value):
            parts = value.values().split(list(self.lengths))
            return torch.nested.nested_tensor_from_jagged(torch.cat([parts[i] for i in rows.tolist()]), offsets)
        return _select_samples(value, rows, len(self.lengths))

    def per_token(self, value: Tensor) -> bool:  # noqa: D102
        return is_jagged(value) and torch.equal(jagged_offsets(value), self._offsets)

    def flatten(self, value: Tensor) -> Tensor:  # noqa: D102
        return value.values()

    def unflatten(self, packed: Tensor) -> Tensor:  # noqa: D102
        return torch.nested.nested_tensor_from_jagged(packed, self._offsets)

    @property
    def shape_name(self) -> str:  # noqa: D102
        return f"jagged [{len(self.lengths)}, (T), ...]"

    def _token_counts(self, mask: Tensor) -> Tensor:
        return torch.stack([part.sum() for part in mask.values().split(list(self.lengths))])


def _like(batch: Mapping[str, Any], values: dict[str, Any]) -> Any:
    """These values in a mapping of the batch's own type, such as one with attributes, where that can be copied."""
    if type(batch) is dict or not isinstance(batch, MutableMapping):
        return values
    same = copy.copy(batch)
    same.update(values)
    return same


def _sample_ids(batch: Mapping[str, Any], samples: int) -> tuple[int, ...]:
    """The batch's own ``sample_ids`` (a list or tensor), or the numbers of its rows."""
    ids = batch.get("sample_ids", range(samples))
    return tuple(ids.tolist() if isinstance(ids, Tensor) else ids)


def _select_samples(value: Any, rows: Tensor, samples: int) -> Any:
    """Cut a per-sample tensor or list (first dimension = samples) down to some rows; anything else passes whole."""
    if isinstance(value, Tensor) and not value.is_nested and value.dim() > 0 and value.shape[0] == samples:
        return value[rows.to(value.device)]
    if isinstance(value, (list, tuple)) and len(value) == samples and not hasattr(value, "_fields"):
        return type(value)(value[i] for i in rows.tolist())
    return value


def view(batch: Any) -> BatchView:
    """The view of a batch in any supported format.

    Raises:
        BatchError: an unknown format, or a batch that breaks the rules of its format.
    """
    if isinstance(batch, PackedBatch):
        return PackedView(batch)
    if isinstance(batch, Mapping):
        if any(is_jagged(value) for value in batch.values()):
            return JaggedView(batch)
        if isinstance(batch.get("input_ids"), Tensor):
            return PaddedView(batch)
    found = f"a mapping with keys {sorted(map(str, batch))}" if isinstance(batch, Mapping) else type(batch).__name__
    raise BatchError(
        f"unknown batch format: found {found}. Supported: a PackedBatch; a dict with input_ids [B, T] and attention_mask "
        "[B, T]; a dict of jagged nested tensors. Change the collate function (lightning_dcp.data has one for each)."
    )
