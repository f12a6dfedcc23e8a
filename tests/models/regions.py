"""Calls of one Hugging Face model as a region, on ranks played by this process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dcp.batch.packed import PackedBatch
from lightning_dcp.batch.view import view
from lightning_dcp.models.huggingface import transformer_adapter
from lightning_dcp.models.pack import ActivePack
from lightning_dcp.models.region import Regions
from lightning_dcp.parallel.context import make_context
from lightning_dcp.parallel.exchange import Exchange
from lightning_dcp.parallel.played import PlayedGroup

Call = Callable[[nn.Module, Any], Any]


def packed(samples: Sequence[Tensor]) -> PackedBatch:
    """Samples of token ids as a pack; every token is its own label."""
    return PackedBatch.from_samples([{"input_ids": ids, "labels": ids} for ids in samples])


def padded(samples: Sequence[Tensor]) -> dict[str, Tensor]:
    """Samples of token ids as rows, with padding behind them."""
    ids = torch.nn.utils.rnn.pad_sequence(list(samples), batch_first=True)
    mask = torch.arange(ids.shape[1]) < torch.tensor([len(sample) for sample in samples])[:, None]
    return {"input_ids": ids, "labels": ids.masked_fill(~mask, -100), "attention_mask": mask.long()}


def on_played_ranks(
    model: nn.Module, batch: Any, size: int, call: Call, *, fused: bool = False, layout: str = "zigzag"
) -> list[Any]:
    """What a call of the model gives on each rank of a CP group, inside a region."""
    played = PlayedGroup(size)
    seen = view(batch)

    def job(exchange: Exchange) -> Any:
        context = make_context(played.group, exchange.rank, seen.lengths, layout=layout, exchange=exchange)
        own = copy.deepcopy(model)  # each rank has its own
        regions = Regions({"model": own}, adapt=lambda module: transformer_adapter(module, fused=fused))
        regions.install()
        try:
            with regions.active(ActivePack(seen, context, max_tokens=1000)):
                return call(own, batch)
        finally:
            regions.remove()

    return played.run(job)
