"""Fields of mappings: what belongs to samples is cut with them, anything else passes whole."""

from __future__ import annotations

import copy
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_dcp.batch.convert import is_jagged, jagged_offsets
from lightning_dcp.batch.packed import cumulative


def like(batch: Mapping[str, Any], values: dict[str, Any]) -> Any:
    """These values in a mapping of the batch's own type, such as one with attributes, where that can be copied."""
    if type(batch) is dict or not isinstance(batch, MutableMapping):
        return values
    same = copy.copy(batch)
    same.update(values)
    return same


def sample_ids(batch: Mapping[str, Any], samples: int) -> tuple[int, ...]:
    """The batch's own ``sample_ids`` (a list or tensor), or the numbers of its samples."""
    ids = batch.get("sample_ids", range(samples))
    return tuple(ids.tolist() if isinstance(ids, Tensor) else ids)


def select_samples(value: Any, indices: Sequence[int], samples: int) -> Any:
    """Cut a per-sample tensor or list (first dimension = samples) down to some samples; anything else passes whole."""
    if is_jagged(value) and len(value) == samples:
        return select_jagged(value, indices, None)
    if isinstance(value, Tensor) and not value.is_nested and value.dim() > 0 and value.shape[0] == samples:
        return value[torch.tensor(list(indices), dtype=torch.int64, device=value.device)]
    if isinstance(value, (list, tuple)) and len(value) == samples and not hasattr(value, "_fields"):
        return type(value)(value[i] for i in indices)
    return value


def select_jagged(value: Tensor, indices: Sequence[int], offsets: Tensor | None) -> Tensor:
    """Some samples of a jagged tensor ``[B, (T), ...]``.

    Args:
        value: the tensor.
        indices: which samples, in this order.
        offsets: their cumulative lengths, for tensors that are to share them; made here by default.
    """
    parts = value.values().split(torch.diff(jagged_offsets(value)).tolist())
    chosen = [parts[i] for i in indices]
    if offsets is None:
        offsets = cumulative([len(part) for part in chosen], value.device).long()
    return torch.nested.nested_tensor_from_jagged(torch.cat(chosen), offsets)
