"""Random numbers inside a model: by pack and rank, the same on tensor-parallel ranks, found again by recomputation."""

from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor

from tests.megatron import runs
from tests.support.plans import GivenPlan
from tests.support.training import assert_same

DROPPED = runs.DENSE | {"hidden_dropout": 0.5}
LENGTHS = (24,)


class Masks(L.Callback):
    """Which of the embedding's numbers were dropped."""

    def __init__(self) -> None:
        self.masks: list[Tensor] = []

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        embedding = pl_module.model.chunks[0].embedding
        embedding.register_forward_hook(lambda module, args, out: self.masks.append(out.detach() == 0))


def job(config: dict[str, Any], plane: int, strategy: dict[str, Any]) -> dict[str, Any]:
    masks = Masks()
    made = runs.fit(
        config,
        LENGTHS,
        1,
        {"scheduler": GivenPlan(plane, [(0, plane, [0])]), **strategy},
        make=lambda config: runs.SmallGPT(config, extra=masks),
    )
    return made | {"masks": masks.masks}


def test_ranks_of_a_context_parallel_group_drop_others_and_tensor_parallel_ones_the_same(ranks):
    found = ranks.run(job, 4, DROPPED, 2, {"tensor_model_parallel_size": 2})
    masks = [own["masks"][0] for own in found]
    assert all(0.3 < mask.double().mean() < 0.7 for mask in masks)
    assert torch.equal(masks[0], masks[1]) and torch.equal(masks[2], masks[3])
    assert not torch.equal(masks[0], masks[2])


def test_recomputed_layers_drop_the_same_again(ranks):
    strategy = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    again = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    kept = ranks.run(job, 4, DROPPED, 2, strategy)
    recomputed = ranks.run(job, 4, DROPPED | again, 2, strategy)
    for own, expected in zip(recomputed, kept, strict=True):
        assert_same(own, expected, 1e-12)
    assert not torch.equal(kept[0]["masks"][0], kept[1]["masks"][0]), "tensor-parallel ranks hold other tokens here"


class LayerMasks(Masks):
    """Which of the numbers that each chunk's first layer adds were dropped."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for chunk in pl_module.model.chunks:
            layer = chunk.decoder.layers[0]
            layer.register_forward_hook(lambda module, args, kwargs, out: self.keep(kwargs, out), with_kwargs=True)

    def keep(self, kwargs: dict[str, Any], out: Any) -> None:
        self.masks.append(out[0].detach() == kwargs["hidden_states"].detach())


def chunk_masks(strategy: dict[str, Any]) -> list[Tensor]:
    masks = LayerMasks()
    config = runs.DENSE | {"hidden_dropout": 0.9}
    plan = GivenPlan(1, [(0, 1, [0]), (0, 1, [1])])
    runs.fit(config, (12, 12), 2, {"scheduler": plan, **strategy}, make=lambda c: runs.SmallGPT(c, extra=masks))
    return masks.masks


def test_stages_and_chunks_drop_others(ranks):
    strategy = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
    masks = [mask for own in ranks.run(chunk_masks, 2, strategy) for mask in own]
    assert len(masks) == 8 and all(0.5 < mask.double().mean() < 0.95 for mask in masks)
    assert all(not torch.equal(a, b) for i, a in enumerate(masks) for b in masks[:i])
