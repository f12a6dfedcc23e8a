"""Plans by hand, and a module whose right numbers can be worked out on paper."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor, nn

from lightning_dcp import SchedulerCallback, StepPlan
from lightning_dcp.batch.labels import shifted_labels
from lightning_dcp.schedule.plan import Pack, in_rounds
from tests.support.training import trainer


class GivenPlan:
    """A scheduler that returns the same packs for every batch: ``(first_rank, cp_size, samples)`` each."""

    def __init__(self, ranks: int, packs: Sequence[tuple[int, int, Sequence[int]]], limit: int = 64) -> None:
        self.ranks, self.limit = ranks, limit
        self.packs = [Pack(first, size, tuple(samples)) for first, size, samples in packs]

    def schedule(self, lengths: Sequence[int]) -> StepPlan:
        plan = StepPlan(self.ranks, self.limit, tuple(lengths), in_rounds(self.packs, self.ranks))
        plan.validate()
        return plan


class Scaled(nn.Module):
    """Each token's value times one weight, which starts at 1."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, values: Tensor, position_ids: Tensor | None = None) -> Tensor:
        return values * self.weight


class PaperModule(L.LightningModule):
    """The loss is the mean of the scaled values over targets, so loss and gradient of the weight are that mean.

    ``outside`` puts the weight behind the region: a parameter that every rank of a group uses on the whole samples.
    """

    def __init__(self, *, outside: bool = False) -> None:
        super().__init__()
        self.model = Scaled()
        self.outside = nn.Parameter(torch.ones(())) if outside else None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        values = self.model(batch["values"])
        if self.outside is not None:
            values = values.detach() * self.outside
        targets = shifted_labels(batch) != -100
        loss = values[targets].mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def train_by_plan(
    module: L.LightningModule,
    batches: Sequence[dict[str, Tensor]],
    packs: Sequence[tuple[int, int, Sequence[int]]] | None,
    world: int,
    *,
    strategy: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Train on these batches by one plan (or by the dynamic scheduler), one SGD step of lr 1 a window."""
    callback = SchedulerCallback(GivenPlan(world, packs) if packs is not None else None)
    run = trainer(strategy={"max_seqlen_per_dp_cp_rank": 64} | (strategy or {}), callbacks=[callback], **options)
    before = {name: p.detach().double().clone() for name, p in module.named_parameters()}
    run.fit(module, torch.utils.data.DataLoader(list(batches), batch_size=None))
    steps = {name: float(before[name] - p.detach().double()) for name, p in module.named_parameters() if p.dim() == 0}
    return {"logged": float(run.callback_metrics["loss"]) if "loss" in run.callback_metrics else None, "steps": steps}
