"""Packed (THD) batches: whole samples one after another along one token axis."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from lightning_dcp.batch.segments import BatchSegments, as_batch_segments
from lightning_dcp.errors import BatchError


class PackedBatch:
    """Samples laid one after another, without padding.

    Every field is shaped ``[1, T, ...]`` (T = tokens of all samples), so model code written for ``[B, T]`` runs as
    it is; ``position_ids`` may also be ``[k, 1, T]``, for models with several kinds of positions. Fields are reached as
    items or as attributes: ``batch["input_ids"]`` is ``batch.input_ids``.

    A plain class rather than a dataclass or a mapping: Lightning walks into those and would cast every float
    field (loss masks included) under ``bf16-true``.

    Args:
        fields: per-token tensors by name, each ``[1, T, ...]``; all share T.
        cu_seqlens: cumulative lengths, ``int32 [S + 1]``, from 0 to T, where S is the number of samples.
        sample_ids: one id a sample (default ``0..S-1``); they survive selection and name samples in errors.
        segments: the parts of each sample, one list of :class:`~lightning_dcp.segments.Segment` a sample; ``None``: samples
            have none.

    Attributes:
        segments: the same, checked; they survive selection and moves.

    Raises:
        BatchError: a field of another shape, boundaries that do not rise from 0 to T, or segments that do not fit their
            samples.
    """

    def __init__(
        self,
        fields: Mapping[str, Tensor],
        cu_seqlens: Tensor,
        sample_ids: Sequence[int] | None = None,
        segments: Sequence[Sequence[Any] | None] | None = None,
    ) -> None:
        self.fields = dict(fields)
        if cu_seqlens.dim() != 1:
            raise BatchError(f"cu_seqlens must be one-dimensional; found shape {tuple(cu_seqlens.shape)}")
        self.cu_seqlens = cu_seqlens.to(torch.int32)
        self._lengths = tuple(int(n) for n in torch.diff(self.cu_seqlens.cpu()).tolist())
        self.sample_ids = tuple(range(len(self._lengths))) if sample_ids is None else tuple(sample_ids)
        self._check()
        self.segments: BatchSegments | None = as_batch_segments(segments, self._lengths, self.sample_ids)

    def _check(self) -> None:
        if len(self.cu_seqlens) < 2 or int(self.cu_seqlens[0]) != 0:
            raise BatchError(f"cu_seqlens must start at 0 and name at least one sample; found {self.cu_seqlens}")
        if not self.fields:
            raise BatchError("a PackedBatch needs at least one per-token field, such as input_ids")
        if len(self.sample_ids) != len(self._lengths):
            raise BatchError(f"{len(self.sample_ids)} sample_ids for {len(self._lengths)} samples")
        for sample, length in zip(self.sample_ids, self._lengths, strict=True):
            if length < 0:
                raise BatchError(f"cu_seqlens falls at sample {sample} (length {length})")
        tokens = sum(self._lengths)
        for name, field in self.fields.items():
            if field.shape[token_axis(name, field, tokens) - 1 :][:2] != (1, tokens):
                raise BatchError(
                    f"field {name!r} has shape {tuple(field.shape)}; a per-token field of this batch is [1, {tokens}, ...]"
                )

    @classmethod
    def from_samples(
        cls,
        samples: Sequence[Mapping[str, Tensor]],
        sample_ids: Sequence[int] | None = None,
        segments: Sequence[Sequence[Any] | None] | None = None,
    ) -> PackedBatch:
        """Pack samples given as mappings of per-token tensors ``[L_i, ...]`` with the same keys."""
        if not samples:
            raise BatchError("a PackedBatch needs at least one sample")
        names = list(samples[0])
        if not names or any(set(sample) != set(names) for sample in samples):
            raise BatchError(f"samples must have the same fields; found {sorted({str(sorted(s)) for s in samples})}")
        lengths = [len(sample[names[0]]) for sample in samples]
        fields = {name: torch.cat([sample[name] for sample in samples]).unsqueeze(0) for name in names}
        return cls(fields, cumulative(lengths, fields[names[0]].device), sample_ids, segments)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sample."""
        return self._lengths

    @property
    def max_seqlen(self) -> int:
        """Length of the longest sample, in tokens."""
        return max(self._lengths)

    @property
    def num_tokens(self) -> int:
        """Tokens of all samples together."""
        return sum(self._lengths)

    @property
    def device(self) -> torch.device:
        """Where the fields lie."""
        return next(iter(self.fields.values())).device

    def to(self, *args: object, **kwargs: object) -> PackedBatch:
        """Like :meth:`torch.Tensor.to`, for the fields; the boundaries move along and stay int32."""
        fields = {name: field.to(*args, **kwargs) for name, field in self.fields.items()}  # type: ignore[call-overload]
        moved = next(iter(fields.values())).device
        return PackedBatch(fields, self.cu_seqlens.to(moved), self.sample_ids, self.segments)

    def pin_memory(self) -> PackedBatch:
        """A copy in page-locked memory, as ``DataLoader(pin_memory=True)`` asks for."""
        fields = {name: field.pin_memory() for name, field in self.fields.items()}
        return PackedBatch(fields, self.cu_seqlens.pin_memory(), self.sample_ids, self.segments)

    def select(self, indices: Sequence[int]) -> PackedBatch:
        """The samples at these indices (into this batch, not ids), in the order given."""
        if not indices:
            raise BatchError("a PackedBatch needs at least one sample")
        spans = spans_of(self._lengths, indices)
        tokens = self.num_tokens
        fields = {
            name: cut_tokens(field, spans, token_axis(name, field, tokens)) for name, field in self.fields.items()
        }
        lengths = [self._lengths[i] for i in indices]
        ids = [self.sample_ids[i] for i in indices]
        segments = None if self.segments is None else [self.segments[i] for i in indices]
        return PackedBatch(fields, cumulative(lengths, self.device), ids, segments)

    def split(self, field: Tensor) -> list[Tensor]:
        """Cut a per-token tensor ``[1, T, ...]`` into one ``[L_i, ...]`` a sample.

        Raises:
            BatchError: a tensor of another shape.
        """
        if tuple(field.shape[:2]) != (1, self.num_tokens):
            raise BatchError(f"a tensor of shape {tuple(field.shape)} is not per-token, [1, {self.num_tokens}, ...]")
        return list(field[0].split(list(self._lengths)))

    def __getitem__(self, name: str) -> Tensor:
        if name == "attention_mask" and name not in self.fields:
            raise KeyError(
                "attention_mask: a packed batch has no padding and needs none; leave it out, or use padded batches"
            )
        return self.fields[name]

    def __contains__(self, name: object) -> bool:
        return name in self.fields

    def __iter__(self) -> Iterator[str]:
        return iter(self.fields)

    def __len__(self) -> int:
        return len(self._lengths)

    def __getattr__(self, name: str) -> Tensor:
        fields = self.__dict__.get("fields", {})
        if name in fields:
            return fields[name]
        raise AttributeError(f"PackedBatch has no field {name!r}; it has {sorted(fields)}")

    def __repr__(self) -> str:
        return f"PackedBatch({len(self)} samples, {self.num_tokens} tokens, fields {list(self.fields)})"


def cumulative(lengths: Sequence[int], device: torch.device | None = None) -> Tensor:
    """``cu_seqlens`` of some lengths: int32 ``[S + 1]``, starting at 0."""
    ends = torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)
    return ends.to(dtype=torch.int32, device=device)


def token_axis(name: str, field: Tensor, tokens: int) -> int:
    """Which axis of a packed field is that of tokens: 1, or 2 for ``position_ids`` that are ``[k, 1, T]``."""
    return 2 if name == "position_ids" and tuple(field.shape[1:]) == (1, tokens) else 1


def spans_of(lengths: Sequence[int], indices: Sequence[int]) -> list[slice]:
    """Where the tokens of these samples lie, in packed samples of these lengths."""
    ends = list(accumulate(lengths))
    return [slice(ends[i] - lengths[i], ends[i]) for i in indices]


def cut_tokens(field: Tensor, spans: Sequence[slice], axis: int) -> Tensor:
    """Spans of a packed field, joined along the axis of its tokens."""
    return torch.cat([field.narrow(axis, span.start, span.stop - span.start) for span in spans], dim=axis)
