"""Outputs of a step, put back into the order of the batch's samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Number
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_dcp.batch.convert import is_jagged, jagged_offsets
from lightning_dcp.batch.packed import PackedBatch, cumulative
from lightning_dcp.errors import BatchError


@dataclass(frozen=True)
class PackOutput:
    """What the user's step returned for one pack.

    Attributes:
        samples: the pack's samples, as indices into the batch.
        lengths: their tokens.
        weight: the weight of its loss, which its scalars share.
        value: what was returned.
    """

    samples: tuple[int, ...]
    lengths: tuple[int, ...]
    weight: float
    value: Any


def join_outputs(outputs: Sequence[PackOutput], *, packed: bool) -> Any:
    """The output that one call on the whole batch would have returned.

    Scalars are weighted like the loss. Tensors and lists with one entry a sample, per-token tensors of a packed batch
    (``[1, T, ...]``) and jagged tensors are put into the batch's order; dicts, tuples and lists of such are walked.

    Args:
        outputs: one of each pack of the batch.
        packed: whether the batch lies sample after sample, so that ``[1, T, ...]`` means tokens.

    Raises:
        BatchError: packs returned unlike things, or something that belongs to no sample.
    """
    first = outputs[0].value
    if any(type(o.value) is not type(first) for o in outputs):
        raise BatchError(f"packs returned different types: {sorted({type(o.value).__name__ for o in outputs})}")
    if first is None:
        return None
    if isinstance(first, Tensor):
        return _join_tensors(outputs, packed=packed)
    if isinstance(first, Number):
        return _weighted(outputs)
    if isinstance(first, PackedBatch):
        return _join_batches(outputs)
    if isinstance(first, Mapping):
        return {key: join_outputs(_pick(outputs, key), packed=packed) for key in _keys(outputs)}
    if isinstance(first, list) and all(len(o.value) == len(o.samples) for o in outputs):
        _check_not_columns(outputs)
        return [part for _, part in sorted(_entries(outputs, lambda o: o.value), key=lambda entry: entry[0])]
    if isinstance(first, (list, tuple)):
        joined = [join_outputs(_pick(outputs, i), packed=packed) for i in range(_common_length(outputs))]
        return type(first)(*joined) if hasattr(first, "_fields") else type(first)(joined)
    if len(outputs) == 1:
        return first
    raise BatchError(f"a step returned {type(first).__name__}, which cannot be put back into sample order: {_ADVICE}")


_ADVICE = "return tensors or lists with one entry a sample, per-token tensors, scalars, or dicts and tuples of these"


def _check_not_columns(outputs: Sequence[PackOutput]) -> None:
    """Refuse lists that could as well be columns: packs of k samples that return k entries of k entries each."""
    sizes = {len(o.samples) for o in outputs}
    if len(outputs) > 1 and len(sizes) == 1 and all(_length(entry) in sizes for o in outputs for entry in o.value):
        raise BatchError(
            f"packs of {min(sizes)} samples returned lists of {min(sizes)} entries that have as many entries themselves: they "
            "may be one a sample, or hold one thing of all samples each. Return a tuple or a dict of the latter; return "
            "the former as one tensor, or as a list of dicts."
        )


def _length(entry: Any) -> int | None:
    if isinstance(entry, Tensor):
        return len(entry) if entry.dim() else None
    return len(entry) if isinstance(entry, list) else None


def _pick(outputs: Sequence[PackOutput], key: Any) -> list[PackOutput]:
    return [PackOutput(o.samples, o.lengths, o.weight, o.value[key]) for o in outputs]


def _keys(outputs: Sequence[PackOutput]) -> list[Any]:
    keys = list(outputs[0].value)
    if any(set(o.value) != set(keys) for o in outputs):
        raise BatchError(f"packs returned dicts with different keys: {sorted({str(list(o.value)) for o in outputs})}")
    return keys


def _common_length(outputs: Sequence[PackOutput]) -> int:
    lengths = {len(o.value) for o in outputs}
    if len(lengths) > 1:
        raise BatchError(f"packs returned sequences of {sorted(lengths)} entries that are not one a sample: {_ADVICE}")
    return lengths.pop()


def _entries(outputs: Sequence[PackOutput], split: Any) -> list[tuple[int, Any]]:
    return [entry for o in outputs for entry in zip(o.samples, split(o), strict=True)]


def _weighted(outputs: Sequence[PackOutput]) -> Any:
    """The sum weighted like the loss (weights add up to 1, but for a loss that is a sum itself).

    A pack without weight may hold NaN and does not count; if no pack has any weight, the plain mean.
    """
    counted = [o for o in outputs if o.weight]
    if not counted:
        return sum(o.value for o in outputs) / len(outputs)
    return sum(o.value * o.weight for o in counted)


def _join_tensors(outputs: Sequence[PackOutput], *, packed: bool) -> Tensor:
    if all(is_jagged(o.value) for o in outputs):
        if any(len(o.value) != len(o.samples) for o in outputs):
            raise BatchError(f"a step returned jagged tensors without one entry a sample: {_ADVICE}")
        parts = _in_order(outputs, lambda o: o.value.values().split(torch.diff(jagged_offsets(o.value)).tolist()))
        offsets = cumulative([len(part) for part in parts], parts[0].device).long()
        return torch.nested.nested_tensor_from_jagged(torch.cat(parts), offsets)
    if all(o.value.dim() == 0 for o in outputs):
        return _weighted(outputs)
    if packed and all(tuple(o.value.shape[:2]) == (1, sum(o.lengths)) for o in outputs):
        return torch.cat(_in_order(outputs, lambda o: o.value[0].split(list(o.lengths)))).unsqueeze(0)
    if all(o.value.dim() > 0 and len(o.value) == len(o.samples) for o in outputs):
        return _stack(_in_order(outputs, lambda o: o.value.unbind(0)))
    raise BatchError(f"a step returned tensors of shapes {[list(o.value.shape) for o in outputs]}: {_ADVICE}")


def _in_order(outputs: Sequence[PackOutput], split: Any) -> list[Tensor]:
    return [part for _, part in sorted(_entries(outputs, split), key=lambda entry: entry[0])]


def _stack(parts: list[Tensor]) -> Tensor:
    """Stack samples; packs are padded to their own longest sample, so shorter ones are padded with 0 here."""
    if len({part.dim() for part in parts}) > 1:
        raise BatchError(f"samples have tensors of different dimensions: {_ADVICE}")
    shape = [max(sizes) for sizes in zip(*(part.shape for part in parts), strict=True)]
    return torch.stack([F.pad(part, _padding(part, shape)) for part in parts])


def _padding(part: Tensor, shape: Sequence[int]) -> list[int]:
    """Padding to a shape, as ``F.pad`` wants it: last dimension first."""
    return [n for size, full in reversed(list(zip(part.shape, shape, strict=True))) for n in (0, full - size)]


def _join_batches(outputs: Sequence[PackOutput]) -> PackedBatch:
    """Packed batches (a step that returns its batch with more fields) joined sample by sample."""
    names = list(outputs[0].value.fields)
    if any(set(o.value.fields) != set(names) for o in outputs):
        raise BatchError(f"packs returned batches with different fields: {[sorted(o.value.fields) for o in outputs]}")
    fields = {
        name: torch.cat(_in_order(outputs, lambda o, name=name: o.value.split(o.value[name]))).unsqueeze(0)
        for name in names
    }
    order = sorted(_entries(outputs, lambda o: zip(o.value.sample_ids, o.value.lengths, strict=True)))
    lengths = [length for _, (_, length) in order]
    segments = None
    if all(o.value.segments is not None for o in outputs):
        segments = [own for _, own in sorted(_entries(outputs, lambda o: o.value.segments), key=lambda entry: entry[0])]
    return PackedBatch(fields, cumulative(lengths), [sample_id for _, (sample_id, _) in order], segments)
