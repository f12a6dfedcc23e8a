"""Token ids that a model has no row for: with tensor parallelism Megatron-Core masks them without a word."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_dcp.errors import BatchError

_REMEDY = (
    "give the model a vocab_size that holds all of the tokenizer's ids (rounded up to a multiple of "
    "tensor_model_parallel_size), or tokenize with the model's own tokenizer"
)


def refuse_unknown_tokens(vocab_size: int, *, input_ids: Tensor | None, labels: Tensor | None) -> None:
    """Refuse ids without a row in the vocabulary. On a GPU one transfer of four numbers waits for the device.

    Args:
        vocab_size: rows of the embedding over all ranks.
        input_ids: tokens, of any shape; None where this rank has no embedding.
        labels: targets, of any shape, negative where there is none; None where this rank computes no losses.

    Raises:
        BatchError: an id below 0 or not below ``vocab_size``, or a label not below it.
    """
    named = {"input_ids": input_ids, "labels": None if labels is None else labels.clamp(min=0)}
    bounds = {name: torch.stack(torch.aminmax(t)) for name, t in named.items() if t is not None and t.numel()}
    if not bounds:
        return
    for name, (lowest, highest) in zip(bounds, torch.stack(list(bounds.values())).tolist(), strict=True):
        if lowest < 0 or highest >= vocab_size:
            strange = lowest if lowest < 0 else highest
            raise BatchError(
                f"asked: a Megatron-Core model on {name} with the id {strange}; found: vocab_size={vocab_size}, so ids from 0 "
                f"to {vocab_size - 1}; do: {_REMEDY}"
            )
