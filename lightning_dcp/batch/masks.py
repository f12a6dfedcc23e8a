"""Which tokens of padded rows are real, as 0/1 attention masks say."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_dcp.errors import BatchError


def padding_mask(batch: Mapping[str, object]) -> Tensor:
    """Real tokens of a padded dict, bool ``[B, T]``.

    ``attention_mask`` says which tokens are real (all of them when it is missing). Each row must be one unbroken run.

    Raises:
        BatchError: no ``input_ids``, or a mask that :func:`real_tokens` refuses.
    """
    ids = batch.get("input_ids")
    if not isinstance(ids, Tensor) or ids.dim() < 2:
        raise BatchError("a padded batch needs input_ids of shape [B, T]")
    return real_tokens(batch.get("attention_mask"), ids)


def real_tokens(mask: object, tokens: Tensor) -> Tensor:
    """Real tokens of rows, bool ``[N, T]``, on the device of the mask.

    Args:
        mask: 0/1 entries ``[N, T]`` of any type of numbers; ``None`` says that all tokens are real.
        tokens: what the mask is for, ``[N, T, ...]``.

    Raises:
        BatchError: a mask of another shape or other values than 0 and 1, or a row with holes in it.
    """
    if mask is None:
        return torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
    if not isinstance(mask, Tensor) or mask.is_nested or mask.shape != tokens.shape[:2]:
        shape = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise BatchError(
            f"attention_mask has shape {shape}, input_ids {tuple(tokens.shape)}: expected one 0/1 entry a token, [B, T] "
            "(masks of another shape, such as [B, 1, T, T] biases, are not supported)"
        )
    real = mask != 0
    if not torch.equal(mask, real.to(mask.dtype)):
        raise BatchError(
            f"attention_mask holds {torch.unique(mask).tolist()[:9]}: expected 0 and 1 (additive masks, and numbers of "
            "documents that share a row, are not supported; a PackedBatch keeps documents apart)"
        )
    starts = (torch.diff(real.int(), dim=1, prepend=real.new_zeros((len(real), 1)).int()) == 1).sum(1)
    if bool((starts > 1).any()):
        raise BatchError(
            f"attention_mask of row {int((starts > 1).nonzero()[0])} has holes: real tokens must be adjacent"
        )
    return real
