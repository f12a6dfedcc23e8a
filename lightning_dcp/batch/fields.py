"""Fields of mappings: what belongs to samples is cut with them, anything else passes whole."""

from __future__ import annotations

import copy
from collections.abc import Mapping, MutableMapping
from typing import Any

from torch import Tensor


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


def select_samples(value: Any, rows: Tensor, samples: int) -> Any:
    """Cut a per-sample tensor or list (first dimension = samples) down to some rows; anything else passes whole."""
    if isinstance(value, Tensor) and not value.is_nested and value.dim() > 0 and value.shape[0] == samples:
        return value[rows.to(value.device)]
    if isinstance(value, (list, tuple)) and len(value) == samples and not hasattr(value, "_fields"):
        return type(value)(value[i] for i in rows.tolist())
    return value
