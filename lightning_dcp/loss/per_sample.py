"""What losses over samples are made of: log-probabilities of tokens, and sums and means of each sample's tokens.

They take batches of any format, so that a module which uses them runs on padded, packed and jagged batches alike. Per-token
tensors have the shape of the batch's ``input_ids``: ``[B, T]``, ``[1, T]`` or jagged ``[B, (T)]``. S is the number of samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_dcp.batch.convert import is_jagged, jagged_offsets
from lightning_dcp.batch.labels import IGNORE_INDEX, Batch
from lightning_dcp.batch.sequences import PaddedSequences, SequenceView
from lightning_dcp.batch.view import view
from lightning_dcp.errors import BatchError


def token_log_probs(logits: Tensor, targets: Tensor, *, temperature: float | Tensor = 1.0) -> Tensor:
    """The log-probability of each target, in nats.

    With hidden states at hand, :func:`~lightning_dcp.loss.linear_log_probs` does the same without holding all logits.

    Args:
        logits: ``[B, T, V]``, ``[1, T, V]`` or jagged.
        targets: already shifted (:func:`lightning_dcp.batch.labels.shifted_labels`), ``[B, T]``, ``[1, T]`` or jagged; -100
            where there is none.
        temperature: what logits are divided by: a number, or one entry a token (:func:`expand_samples` makes it of one a
            sample).

    Returns:
        A tensor like the targets, in float32 or better; 0, with a gradient of 0, where there is no target.

    Raises:
        BatchError: shapes that do not fit.
    """
    if is_jagged(targets):
        if isinstance(temperature, Tensor) and temperature.is_nested:
            temperature = temperature.values()
        log_probs = token_log_probs(_values(logits), targets.values(), temperature=temperature)
        return torch.nested.nested_tensor_from_jagged(log_probs, jagged_offsets(targets))
    if logits.shape[:-1] != targets.shape:
        raise BatchError(
            f"logits {list(logits.shape)} do not fit targets {list(targets.shape)}: expected one more axis, V"
        )
    if isinstance(temperature, Tensor) and temperature.dim():
        if temperature.shape != targets.shape:
            raise BatchError(
                f"temperature {list(temperature.shape)} must have one entry a token, {list(targets.shape)}: use "
                "expand_samples(temperature, batch) if it has one a sample"
            )
        # padding may have a temperature of 0, and a gradient of 0 times the infinity that this gives is no number
        temperature = temperature.masked_fill(targets == IGNORE_INDEX, 1.0).unsqueeze(-1)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    losses = F.cross_entropy(wide.flatten(0, -2), targets.flatten(), ignore_index=IGNORE_INDEX, reduction="none")
    return -losses.view(targets.shape)


def expand_samples(values: Tensor, batch: Batch) -> Tensor:
    """A value of each sample at each of its tokens, such as the advantage of an answer.

    Args:
        values: ``[S]``. A tensor that is per-token already is returned as it is: fields of a
            :class:`~lightning_dcp.PackedBatch` are, so collate such values there once a token.
        batch: says where the samples lie.

    Returns:
        A per-token tensor; padding of a row has the row's value.

    Raises:
        BatchError: a tensor of another shape.
    """
    tokens = _tokens(batch)
    if tokens.per_token(values):
        return values
    if values.is_nested or values.shape != (len(tokens.lengths),):
        raise BatchError(
            f"expected one value a sample, [{len(tokens.lengths)}], or a token, {tokens.shape_name}; found shape "
            f"{tuple(values.shape)}"
        )
    if isinstance(tokens, PaddedSequences):
        return values.unsqueeze(1).expand(tokens.mask.shape)
    return tokens.unflatten(values.repeat_interleave(_lengths(tokens, values.device)))


def sample_sums(values: Tensor, batch: Batch) -> Tensor:
    """The sum of a per-token tensor over the tokens of each sample, without padding.

    The log-probability of a sample is that of its tokens' log-probabilities (:func:`token_log_probs`).

    Args:
        values: per-token, floating point.
        batch: says where the samples lie.

    Returns:
        ``[S]``, differentiable.

    Raises:
        BatchError: a tensor that is not per-token.
    """
    tokens = _tokens(batch)
    return _sums(_flat(values, tokens), tokens)


def sample_means(values: Tensor, mask: Tensor, batch: Batch) -> Tensor:
    """The mean of a per-token tensor over those tokens of each sample that count.

    Args:
        values: per-token, floating point.
        mask: per-token, bool, such as ``shifted_labels(batch) != -100``.
        batch: says where the samples lie.

    Returns:
        ``[S]``, differentiable; 0 for a sample of which no token counts.

    Raises:
        BatchError: a tensor that is not per-token.
    """
    tokens = _tokens(batch)
    counted = _flat(mask, tokens)
    kept = torch.where(counted, _flat(values, tokens), 0.0)
    return _sums(kept, tokens) / _sums(counted.to(kept.dtype), tokens).clamp(min=1)


def token_mean(values: Tensor, mask: Tensor) -> Tensor:
    """The mean of a per-token tensor over all tokens of the batch that count; 0 if none does.

    Args:
        values: ``[B, T]``, ``[1, T]`` or jagged, floating point.
        mask: of the same shape, bool, such as ``shifted_labels(batch) != -100``.

    Returns:
        A scalar, differentiable.
    """
    values, mask = _values(values), _values(mask)
    return torch.where(mask, values, 0.0).sum() / mask.sum().clamp(min=1)


def last_tokens(values: Tensor, batch: Batch) -> Tensor:
    """What a per-token tensor holds at the last token of each sample, as reward models and classifiers need it.

    Args:
        values: per-token, ``[B, T, ...]``, ``[1, T, ...]`` or jagged.
        batch: says where the samples lie.

    Returns:
        ``[S, ...]``, differentiable.

    Raises:
        BatchError: a tensor that is not per-token, or a sample without a token.
    """
    tokens = _tokens(batch)
    lengths = _lengths(tokens, values.device)
    if 0 in tokens.lengths:
        raise BatchError(f"sample {tokens.lengths.index(0)} of the batch has no token, so no last one")
    return _flat(values, tokens).index_select(0, lengths.cumsum(0) - 1)


def family(batch: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """The batch of one family of a batch with several sequences a sample: ``chosen_input_ids`` as ``input_ids``, and so on.

    Args:
        batch: such as ``{"chosen_input_ids": ..., "rejected_input_ids": ...}``.
        prefix: such as ``"chosen_"``.

    Raises:
        BatchError: the batch has no ``input_ids`` of this prefix.
    """
    fields = {name[len(prefix) :]: value for name, value in batch.items() if name.startswith(prefix)}
    if "input_ids" not in fields:
        raise BatchError(f"the batch has no field {prefix}input_ids; it has {sorted(batch)}")
    return fields


def _values(value: Tensor) -> Tensor:
    return value.values() if value.is_nested else value


def _tokens(batch: Batch) -> SequenceView:
    tokens = view(batch).tokens
    if tokens is None:
        raise BatchError(
            'samples of several sequences each: say which, such as family(batch, "chosen_") for chosen_input_ids'
        )
    return tokens


def _flat(values: Tensor, tokens: SequenceView) -> Tensor:
    if not tokens.per_token(values):
        raise BatchError(f"expected one entry a token, {tokens.shape_name}; found shape {tuple(values.shape)}")
    return tokens.flatten(values)


def _lengths(tokens: SequenceView, device: torch.device) -> Tensor:
    return torch.tensor(tokens.lengths, device=device)


def _sums(flat: Tensor, tokens: SequenceView) -> Tensor:
    return torch.segment_reduce(flat, "sum", lengths=_lengths(tokens, flat.device), initial=0.0)
