"""Batches of any lengths, in the format of a real one."""

from __future__ import annotations

import copy
from collections.abc import Mapping, MutableMapping, Sequence
from math import gcd
from typing import Any

import torch
from torch import Tensor

from lightning_dcp.batch import PackedBatch, packed_to_jagged, packed_to_padded
from lightning_dcp.batch.segments import SEGMENTS
from lightning_dcp.batch.view import BatchView, JaggedView, PackedView, PaddedView, view
from lightning_dcp.errors import BatchError


class SampleSource:
    """Makes batches whose samples have given lengths, of the tokens of one real batch.

    Of fields that hold one entry a token, entries are taken from all over the batch, those of one token together: ids,
    labels and masks are ones that the model knows, and each sample has its share of targets, also where the data begins
    with a long prompt that has none. The text makes no sense. Fields that hold one entry a sample repeat the real ones;
    all else is handed on.

    Args:
        batch: a batch in any supported format.

    Raises:
        BatchError: an unknown format, or one of samples of several sequences or of flattened samples; an empty batch or an
            empty sample.
    """

    def __init__(self, batch: Any) -> None:
        self._view: BatchView = view(batch)
        self._view.check()
        if not isinstance(self._view, PackedView | PaddedView | JaggedView):
            raise BatchError(
                f"batches of other lengths cannot be made of a {type(self._view).__name__.removesuffix('View').lower()} batch: "
                "measure with packed, padded or jagged batches of the same samples"
            )
        fields = batch.fields if isinstance(batch, PackedBatch) else dict(batch)
        tensors = {name: value for name, value in fields.items() if isinstance(value, Tensor)}
        flat = {
            n: self._view.flatten(t) for n, t in tensors.items() if n != "attention_mask" and self._view.per_token(t)
        }
        self._tokens: dict[str, Tensor] = flat
        # Segments are of these lengths; made-up samples have none.
        self._others = {name: value for name, value in fields.items() if name not in flat and name != SEGMENTS}

    def batch(self, lengths: Sequence[int]) -> Any:
        """A batch of samples of these lengths, in the format of the real one."""
        packed = self._packed(lengths)
        if isinstance(self._view, PackedView):
            return packed
        same = packed_to_jagged(packed) if isinstance(self._view, JaggedView) else packed_to_padded(packed)
        if "attention_mask" not in self._others and len(set(lengths)) == 1:
            same.pop("attention_mask", None)  # such a loader makes rows of one length, and its model may take no mask
        others = {n: self._resized(v, len(lengths)) for n, v in self._others.items() if n != "attention_mask"}
        return _like(self._view.batch, {**others, **same})

    def _packed(self, lengths: Sequence[int]) -> PackedBatch:
        available = len(next(iter(self._tokens.values())))
        index = torch.arange(sum(lengths)) * _stride(available) % available
        fields = {name: tokens[index.to(tokens.device)].unsqueeze(0) for name, tokens in self._tokens.items()}
        borders = torch.tensor([0, *lengths]).cumsum(0)
        return PackedBatch(fields, borders.to(next(iter(fields.values())).device))

    def _resized(self, value: Any, samples: int) -> Any:
        """A value of one entry a sample, for this many samples; any other as it is."""
        count = len(self._view.lengths)
        rows = [sample % count for sample in range(samples)]
        if isinstance(value, Tensor) and not value.is_nested and value.dim() > 0 and value.shape[0] == count:
            return value[torch.tensor(rows, device=value.device)]
        if isinstance(value, list | tuple) and len(value) == count and not hasattr(value, "_fields"):
            return type(value)(value[row] for row in rows)
        return value


def _stride(count: int) -> int:
    """A step that visits all of ``count`` places before it comes back, spread evenly at any time."""
    golden = max(1, round(0.618 * count))
    return next(step for step in range(golden, golden + count) if gcd(step, count) == 1)


def _like(batch: Mapping[str, Any], values: dict[str, Any]) -> Any:
    """These values in a mapping of the batch's own type, where that can be copied."""
    if type(batch) is dict or not isinstance(batch, MutableMapping):
        return values
    same = copy.copy(batch)
    same.clear()
    same.update(values)
    return same
