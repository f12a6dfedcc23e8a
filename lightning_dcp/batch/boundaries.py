"""Where the samples of a flattened mapping begin and end, as its fields say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from lightning_dcp.batch.convert import is_jagged
from lightning_dcp.errors import BatchError

CUMULATIVE = ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens", "cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_kv")
"""Fields that hold cumulative lengths ``[S + 1]``: names of Transformers, flash-attn and Megatron-Core."""

LONGEST = ("max_length_q", "max_length_k", "max_seqlen", "max_seqlen_q", "max_seqlen_k", "max_seqlen_kv")
"""Fields that hold the length of the longest sample."""

NUMBERS = "seq_idx"
"""The field that numbers the sample of each token, ``[1, T]``."""


def flattened_lengths(batch: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The lengths of samples that lie one after another in ``input_ids [1, T]``; ``None`` for any other batch.

    In this order: cumulative lengths, which win over everything else; the numbers of samples in ``seq_idx``;
    ``position_ids [1, T]`` that begin again inside the row, if ``attention_mask`` is missing or has no zero (in Transformers,
    too, these mean documents; with zeros they may be those of a padded row).

    Raises:
        BatchError: cumulative lengths that do not rise from 0 to T, that differ, that come with ``input_ids`` of another
            shape, or under a name that is not known.
    """
    ids = batch.get("input_ids")
    if not isinstance(ids, Tensor):
        return None
    named = [name for name in batch if isinstance(name, str) and name.startswith("cu_seq")]
    if named:
        return _explicit(batch, named, ids)
    if is_jagged(ids) or ids.dim() < 2 or len(ids) != 1 or ids.shape[1] == 0:
        return None
    starts = _numbered_starts(batch.get(NUMBERS), ids)
    if starts is None and _no_zero(batch.get("attention_mask"), ids):
        starts = _restarts(batch.get("position_ids"), ids)
    if starts is None:
        return None
    borders = [*starts.nonzero().squeeze(1).tolist(), ids.shape[1]]
    return tuple(end - start for start, end in pairwise(borders))


def refuse_restarts(batch: Mapping[str, Any]) -> None:
    """Raise :class:`BatchError` for padded rows ``[B, T]`` without a mask whose positions begin again inside a row.

    Models of Transformers keep the documents of such a row apart; here a row of a padded batch is one sample.
    """
    positions, ids = batch.get("position_ids"), batch["input_ids"]
    if not isinstance(positions, Tensor) or positions.shape != ids.shape[:2] or batch.get("attention_mask") is not None:
        return
    ahead, behind = positions[:, 1:], positions[:, :-1]
    again = ahead == positions[:, :1]
    counted = again | (ahead == behind + 1)
    # a second document of two tokens or more: padding may have the first position throughout
    second = again[:, :-1] & (ahead[:, 1:] == ahead[:, :-1] + 1)
    rows = (counted.all(1) & second.any(1)).nonzero().squeeze(1)
    if len(rows):
        raise BatchError(
            f"position_ids of row {int(rows[0])} begin again inside the row, as where documents share one; a row of a padded "
            "batch is one sample. Put all documents into one row [1, T] (as DataCollatorWithFlattening does), use a "
            "PackedBatch, or pass attention_mask if the row is one document"
        )


def _explicit(batch: Mapping[str, Any], names: Sequence[str], ids: Tensor) -> tuple[int, ...]:
    unknown = [name for name in names if name not in CUMULATIVE]
    if unknown:
        raise BatchError(f"{unknown} cannot be cut with the samples: leave it out; known are {list(CUMULATIVE)}")
    if is_jagged(ids) or ids.dim() < 2 or len(ids) != 1:
        raise BatchError(
            f"{names[0]} says where samples lie in input_ids [1, T], but input_ids has shape {tuple(ids.shape)}: leave it out"
        )
    found = {name: _cumulative_of(name, batch[name], ids.shape[1]) for name in names}
    first = found[names[0]]
    for name, ends in found.items():
        if ends != first:
            raise BatchError(f"{names[0]} and {name} differ: queries and keys must be of the same samples")
    return tuple(end - start for start, end in pairwise(first))


def _cumulative_of(name: str, value: object, tokens: int) -> list[int]:
    ends: Any = value.tolist() if isinstance(value, Tensor) else value
    if not isinstance(ends, list | tuple) or not all(isinstance(end, int) for end in ends):
        raise BatchError(f"{name} must hold the cumulative lengths of samples, int32 [S + 1]; found {value}")
    falls = any(end < start for start, end in pairwise(ends))
    if len(ends) < 2 or ends[0] != 0 or ends[-1] != tokens or falls:
        raise BatchError(f"{name} must rise from 0 to the {tokens} tokens of input_ids; found {ends}")
    return list(ends)


def _numbered_starts(numbers: object, ids: Tensor) -> Tensor | None:
    """Tokens with another sample number than the token before, bool ``[T]``."""
    if not isinstance(numbers, Tensor) or numbers.shape != ids.shape[:2]:
        return None
    return torch.cat([numbers.new_ones(1).bool(), torch.diff(numbers[0]) != 0])


def _restarts(positions: object, ids: Tensor) -> Tensor | None:
    """Tokens at the first token's position, bool ``[T]``, if the positions between them count on, and there are several."""
    if not isinstance(positions, Tensor) or positions.shape != ids.shape[:2]:
        return None
    starts = positions[0] == positions[0, 0]
    counted = starts[1:] | (positions[0, 1:] == positions[0, :-1] + 1)
    return starts if int(starts.sum()) > 1 and bool(counted.all()) else None


def _no_zero(mask: object, ids: Tensor) -> bool:
    return mask is None or (isinstance(mask, Tensor) and mask.shape == ids.shape[:2] and bool((mask == 1).all()))
