"""Models that count positions from another number than 0."""

from __future__ import annotations

from torch import nn

_MAKERS = ("create_position_ids_from_input_ids", "create_position_ids_from_inputs_embeds")
"""Methods by which embeddings of fairseq's kind make positions of their own; which of them there are depends on the version of
transformers."""


def first_position(model: nn.Module) -> int:
    """The position that a model gives to a sample's first token, where it is told none.

    That is 0, but for RoBERTa and its kin ``padding_idx + 1``, as fairseq's ``make_positions`` has it (``fairseq/utils.py``):
    their table of positions has a row for padding.
    """
    for layer in model.modules():
        padding = getattr(layer, "padding_idx", None)
        if isinstance(padding, int) and any(hasattr(layer, maker) for maker in _MAKERS):
            return padding + 1
    return 0
