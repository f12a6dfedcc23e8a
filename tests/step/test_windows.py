"""A ``Running`` metric in a step that is tried out with sharded outputs: its window moves once for each batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torchmetrics import MeanMetric, SumMetric
from torchmetrics.wrappers import Running

from lightning_dcp import next_token_loss
from tests.support.ranks import RankPool
from tests.support.training import TinyModule, loader, trainer

LENGTHS = (60, 3, 30, 7, 1, 12, 5, 29, 2, 61)


class Windowed(TinyModule):
    """The only metrics of its step are windows over lengths, of which shards would count some twice."""

    def __init__(self) -> None:
        super().__init__(lr=0.1)
        self.updated, self.called = Running(SumMetric(), 2), Running(MeanMetric(), 3)
        for metric in (self.updated, self.called):
            metric.base_metric.set_dtype(torch.float64)
            metric.set_dtype(torch.float64)
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = next_token_loss(self.model(batch["input_ids"]), batch)
        lengths = batch["attention_mask"].sum(-1).double()
        self.updated.update(lengths)
        self.called(lengths)
        self.log("updated", self.updated, on_step=False, on_epoch=True)
        self.log("called", self.called, on_step=False, on_epoch=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for metric in (self.updated, self.called):
            self.seen += [float(metric._num_vals_seen), float(metric.compute())]


def windowed(strategy: dict[str, Any] | None) -> dict[str, Any]:
    module = Windowed()
    run = trainer(strategy=strategy)
    run.fit(module, loader(LENGTHS, 3))
    logged = {name: float(value) for name, value in run.callback_metrics.items()}
    outputs = getattr(run.strategy, "_outputs", None)
    return {"seen": module.seen, "logged": logged, "sharded": outputs and outputs.sharded}


def test_a_trial_of_sharded_outputs_does_not_move_windows(ranks: RankPool) -> None:
    expected = ranks.run(windowed, 1, None)[0]
    assert expected["seen"][::4] == expected["seen"][2::4] == [1, 2, 3, 4]
    for ours in ranks.run(windowed, 2, {"max_seqlen_per_dp_cp_rank": 32, "outputs": "auto"}):
        assert ours["sharded"] is False  # the windows are over samples
        assert ours["seen"] == pytest.approx(expected["seen"], rel=1e-9)
        assert ours["logged"] == pytest.approx(expected["logged"], rel=1e-9)
