"""A pack as one of its ranks sees it with sharded outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_dcp.batch.packed import PackedBatch
from lightning_dcp.batch.sequences import IGNORE_INDEX, SequenceView
from lightning_dcp.batch.sharded import ShardedBatch
from lightning_dcp.batch.targets import TARGETS
from lightning_dcp.errors import BatchError
from lightning_dcp.loss.weighting import LossNormalization, shard_weight
from lightning_dcp.models.positions import POSITIONS
from lightning_dcp.parallel.context import CPContext
from lightning_dcp.step.scheduled import PackWork


def can_be_sharded(work: PackWork) -> bool:
    """Whether regions add no fill tokens on any rank of the pack's group; the same on all of them.

    Fields of the user's own would count those. They are added where a rank has fewer than two tokens, or where a back end
    needs padding.
    """
    return work.active.context.region_tokens == work.active.context.tokens


def sharded(work: PackWork, normalization: LossNormalization, batch_targets: int) -> PackWork:
    """The same pack, with this rank's tokens in the step's hands and this rank's share of the loss.

    Args:
        work: the pack in whole samples.
        normalization: what the user's loss is over one batch.
        batch_targets: targets of the whole batch.

    Raises:
        BatchError: a batch whose samples have several sequences, or that does not say which tokens are targets.
    """
    tokens, context = work.active.view.tokens, work.active.context
    if tokens is None:
        raise BatchError(
            "samples of several sequences each, which a token-wise loss cannot be about: use outputs='gathered'"
        )
    batch = _shard(_fields(work.batch), tokens, context)
    weight = shard_weight(normalization, _targets_here(batch, normalization), batch_targets)
    return replace(
        work,
        batch=batch,
        active=replace(work.active, sharded=True),
        weight=weight,
        pack_weight=work.weight,
        leader=True,
    )


def _fields(batch: PackedBatch | Mapping[str, Any]) -> dict[str, Any]:
    return dict(batch.fields if isinstance(batch, PackedBatch) else batch)


def _shard(fields: dict[str, Any], tokens: SequenceView, context: CPContext) -> ShardedBatch:
    if isinstance(fields.get("labels"), Tensor) and tokens.per_token(fields["labels"]):
        fields.setdefault("shift_labels", tokens.shifted(fields["labels"]))
    kept: dict[str, Any] = {}
    for name, value in fields.items():
        if not isinstance(value, Tensor) or value.dim() == 0:
            kept[name] = value
        elif name == POSITIONS and tokens.leading(value) == 1:  # [k, N, T]
            kept[name] = torch.stack([_cut(part, tokens, context) for part in value])
        elif tokens.per_token(value):
            kept[name] = _cut(value, tokens, context)
    samples = len(tokens.lengths)
    kept = {name: value for name, value in kept.items() if isinstance(value, Tensor) or not _of_samples(value, samples)}
    if "attention_mask" in kept:
        kept["attention_mask"] = torch.ones_like(kept["attention_mask"])
    return ShardedBatch(kept, tuple(fields.keys() - kept.keys()))


def _cut(value: Tensor, tokens: SequenceView, context: CPContext) -> Tensor:
    """This rank's tokens, ``[1, T_local, ...]``."""
    return tokens.flatten(value).index_select(0, context.pack_index).unsqueeze(0)


def _of_samples(value: Any, samples: int) -> bool:
    return isinstance(value, list | tuple) and len(value) == samples


def _targets_here(batch: ShardedBatch, normalization: LossNormalization) -> int:
    if normalization == "sum":
        return 0
    if "shift_labels" in batch:
        return int((batch["shift_labels"] != IGNORE_INDEX).sum())
    if "loss_mask" in batch:
        return int((batch["loss_mask"] != 0).sum())
    raise BatchError(
        f"outputs='sharded' needs to know which tokens are targets: put one of {', '.join(TARGETS)} into the batch, or use "
        "loss_normalization='sum' or outputs='gathered'"
    )
