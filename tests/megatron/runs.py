"""Runs of a small Megatron-Core model, on any layout, told by the weights of the whole model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor, nn

from lightning_dcp import MegatronGPT, next_token_loss
from lightning_dcp.batch.labels import shifted_labels
from lightning_dcp.models.megatron.weights import load_whole_weights, whole_weights
from tests.support.plans import GivenPlan
from tests.support.training import VOCAB, Recorder, loader, trainer

DENSE = {"num_layers": 4, "hidden_size": 16, "num_attention_heads": 4, "num_query_groups": 2, "ffn_hidden_size": 24}
"""As many layers as the deepest pipeline needs, heads that 2 and 4 tensor-parallel ranks share."""
MOE = DENSE | {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 12,
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_dtype": "fp64",
    "moe_aux_loss_coeff": 0.0,
    "moe_router_load_balancing_type": "none",
}
VOCABULARY = VOCAB + 7
"""A multiple of 2, 3, 4 and 8, that holds the tokens of the random samples."""
LENGTHS = (13, 5, 9, 3, 7, 11)
PLANS = {
    1: [[(0, 1, [0])], [(0, 1, [1, 2])], [(0, 1, [3])], [(0, 1, [4, 5])]],
    2: [[(0, 2, [0])], [(0, 1, [1]), (1, 1, [2, 3])], [(0, 2, [4])], [(0, 2, [5])]],
    4: [[(0, 4, [0])], [(0, 2, [1]), (2, 1, [2]), (3, 1, [3])], [(0, 4, [4])], [(0, 4, [5])]],
}
"""By ranks of the plane: four micro-batches of mixed sizes for samples of these lengths."""


def given(ranks: int, reverse: bool = False) -> GivenPlan:
    """A scheduler that gives these plans, or their micro-batches in reverse order."""
    rounds = reversed(PLANS[ranks]) if reverse else PLANS[ranks]
    return GivenPlan(ranks, [pack for packs in rounds for pack in packs])


def plane_of(world: int, layout: dict[str, Any]) -> int:
    """Ranks of the plane under these sizes."""
    stages, tensor = (layout.get(f"{kind}_model_parallel_size", 1) for kind in ("pipeline", "tensor"))
    return world // (stages * tensor)


def made_up(name: str, shape: Sequence[int]) -> Tensor:
    """A weight of the whole model: the same for a name on every layout, far from uniform attention."""
    if "norm" in name:
        return torch.ones(shape, dtype=torch.float64)
    generator = torch.Generator().manual_seed(sum(ord(c) * (i + 1) for i, c in enumerate(name)))
    return 0.3 * torch.randn(shape, generator=generator, dtype=torch.float64)


class SmallGPT(MegatronGPT):
    """A model with made-up weights, trained by plain SGD.

    Args:
        config: fields of the TransformerConfig.
        logits: compute the loss from logits in the step, in full precision; else from the losses that the model gives.
        lr: of SGD.
        extra: a callback.
        **options: of MegatronGPT.
    """

    def __init__(
        self,
        config: dict[str, Any],
        logits: bool = True,
        lr: float = 1.0,
        extra: L.Callback | None = None,
        **options: Any,
    ) -> None:
        super().__init__(config, VOCABULARY, **options)
        self.logits, self.lr, self.extra = logits, lr, extra

    def configure_callbacks(self) -> list[L.Callback]:
        return [] if self.extra is None else [self.extra]

    def configure_model(self) -> None:
        super().configure_model()
        shapes = whole_shapes(self.model)
        load_whole_weights(self.model, lambda name: made_up(name, shapes[name]))

    def _loss(self, batch: Any) -> tuple[Tensor, int]:
        if not self.logits:
            return super()._loss(batch)
        loss = next_token_loss(self.model(input_ids=batch["input_ids"]), batch)
        targets = shifted_labels(batch)
        return loss, int(((targets.values() if targets.is_nested else targets) != -100).sum())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def whole_shapes(model: nn.Module) -> dict[str, Any]:
    return {name: tensor.shape for name, tensor in whole_weights(model).items()}


class WholeGradients(Recorder):
    """Also gathers the gradients of the whole model."""

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.gradients.append(whole_weights(pl_module.model, lambda p: p.grad))


def fit(
    config: dict[str, Any],
    lengths: Sequence[int],
    batch_size: int,
    strategy: dict[str, Any],
    *,
    fmt: str = "packed",
    precision: str = "64-true",
    module: dict[str, Any] | None = None,
    make: Callable[..., Any] = SmallGPT,
    **options: Any,
) -> dict[str, Any]:
    """Train, and return all that has to agree; on every rank the same."""
    recorder = WholeGradients()
    model = make(config, **(module or {}))
    run = trainer(strategy=strategy, precision=precision, callbacks=[recorder], **options)
    run.fit(model, loader(lengths, batch_size, fmt))
    return {
        "losses": recorder.losses,
        "gradients": recorder.gradients,
        "weights": whole_weights(model.model),
        "logged": {name: float(value) for name, value in run.callback_metrics.items()},
        "cp_sizes": recorder.cp_sizes,
    }
