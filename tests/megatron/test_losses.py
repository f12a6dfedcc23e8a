"""Losses beyond next-token: value heads, distillation, temperatures of each sample; against one process."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_dcp import MegatronModel
from lightning_dcp.batch.labels import shifted_labels
from lightning_dcp.models.megatron import put_scalar_head
from lightning_dcp.models.megatron.weights import load_whole_weights
from tests.megatron import runs
from tests.support.training import assert_same

LENGTHS = (13, 5, 9, 3, 7, 11, 2, 6)
SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP = {"pipeline_model_parallel_size": 2}
LAYOUTS = {"TP2+SP": (4, SP), "PP2xTP2+SP": (8, PP | SP)}


class Values(runs.SmallGPT):
    """Numbers of a scalar head, and a value loss."""

    def provider(self, *args: Any, **kwargs: Any) -> Any:
        return put_scalar_head(super().provider(*args, **kwargs))

    def _loss(self, batch: Any) -> tuple[Tensor, int]:
        values = self.model(input_ids=batch["input_ids"]).squeeze(-1)
        wanted = shifted_labels(batch)
        return ((values - wanted / 10) ** 2)[wanted != -100].mean(), 1


class Temperatures(runs.SmallGPT):
    """Each token has a temperature of its own."""

    def _loss(self, batch: Any) -> tuple[Tensor, int]:
        ids = batch["input_ids"]
        logits = self.model(input_ids=ids) / (0.5 + (ids % 5) / 4).unsqueeze(-1)
        return F.cross_entropy(logits.flatten(0, 1), shifted_labels(batch).flatten()), 1


class Distilled(runs.SmallGPT):
    """A teacher of other weights in the same module."""

    def configure_model(self) -> None:
        super().configure_model()
        self.teacher = MegatronModel(self.provider).requires_grad_(False)
        shapes = runs.whole_shapes(self.teacher)
        load_whole_weights(self.teacher, lambda name: runs.made_up(name + "teacher", shapes[name]))

    def _loss(self, batch: Any) -> tuple[Tensor, int]:
        with torch.no_grad():
            right = self.teacher(input_ids=batch["input_ids"]).log_softmax(-1)
        own = self.model(input_ids=batch["input_ids"]).log_softmax(-1)
        wanted = shifted_labels(batch) != -100
        return F.kl_div(own, right, reduction="none", log_target=True).sum(-1)[wanted].mean(), 1

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), lr=self.lr)


def job(make: type, strategy: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    limit = {"max_seqlen_per_dp_cp_rank": 16}
    return runs.fit(runs.DENSE | config, LENGTHS, 4, limit | strategy, make=make)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("make", [Values, Temperatures])
def test_losses_of_other_kinds_agree_with_one_process(ranks, make, layout):
    world, strategy = LAYOUTS[layout]
    expected = ranks.run(job, 1, make, {}, {})[0]
    assert expected["losses"][0] != expected["losses"][1]
    for own in ranks.run(job, world, make, strategy, {}):
        assert_same(own, expected, 1e-9)


def test_a_teacher_in_the_same_module_agrees_with_one_process(ranks):
    expected = ranks.run(job, 1, Distilled, {}, {})[0]
    for own in ranks.run(job, 4, Distilled, SP, {}):
        assert_same(own, expected, 1e-9)


def test_a_teacher_in_a_pipeline_is_refused(ranks):
    outcomes = ranks.run_all(job, 2, Distilled, PP, {})
    assert not any(ok for ok, _ in outcomes)
    assert all("pipeline_model_parallel_size=2" in text and "teacher" in text for _, text in outcomes)
