"""Next-token cross-entropy for a batch of any format."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from lightning_dcp.batch.convert import is_jagged
from lightning_dcp.batch.labels import IGNORE_INDEX, Batch, shifted_labels


def next_token_loss(logits: Tensor, batch: Batch) -> Tensor:
    """The mean cross-entropy over the batch's targets.

    Args:
        logits: ``[B, T, vocab]``, ``[1, T, vocab]`` or jagged, as the batch's ``input_ids``.
        batch: has ``labels`` (Hugging Face convention) or ``shift_labels`` (already shifted), not both.
    """
    targets = shifted_labels(batch)
    if is_jagged(logits):
        logits, targets = logits.values(), targets.values()
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1), ignore_index=IGNORE_INDEX)
