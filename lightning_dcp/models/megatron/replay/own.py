"""Which calls of a model are about the batch's samples, so that routes belong to their tokens."""

from __future__ import annotations

from torch import Tensor

from lightning_dcp.models.call import RegionCall
from lightning_dcp.models.megatron.replay.store import field_of

_TOKENS = "input_ids"


def own_samples(call: RegionCall) -> tuple[int, ...] | None:
    """The samples of the batch that a call is about; None for other sequences.

    Sequences of the same lengths need not be the samples: answers to compare with, tokens with noise. So the call's
    ``input_ids`` have to be the batch's, or equal to them, for which the CPU waits for the device.

    Args:
        call: before its arguments are cut.
    """
    pack = call.pack
    if pack.context.layout.lengths != call.context.layout.lengths:
        return None
    given, own = call.arguments.get(_TOKENS), field_of(pack.view, _TOKENS)
    if not isinstance(given, Tensor) or not isinstance(own, Tensor) or not pack.view.per_token(own):
        return None
    return pack.samples if given is own or _equal(call, given, pack.view.flatten(own)) else None


def _equal(call: RegionCall, given: Tensor, packed: Tensor) -> bool:
    """Whether a call's tokens are these ``[T]``; in a sharded step, whether they are this rank's part."""
    tokens, right = (given[0], call.filled(packed)) if call.pack.sharded else (call.sequences.flatten(given), packed)
    return tokens.shape == right.shape and bool((tokens == right.to(tokens.device)).all())
