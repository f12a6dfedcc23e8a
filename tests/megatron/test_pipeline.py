"""Pipelines of unequal micro-batches, and what every stage knows of them."""

from typing import Any

import lightning.pytorch as L
import pytest

from tests.megatron import runs
from tests.support.plans import GivenPlan
from tests.support.training import assert_same

LENGTHS = (8, 16, 4)
SIX = runs.DENSE | {"num_layers": 6}


class Seen(L.Callback):
    """The boundaries that attention of this rank's layers was about, call by call."""

    def __init__(self) -> None:
        self.lengths: list[tuple[int, ...]] = []

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        layer = pl_module.model.chunks[0].decoder.layers[0].self_attention.core_attention
        layer.register_forward_pre_hook(
            lambda module, args: self.lengths.append(module.scope.current.context.layout.lengths)
        )


def job(plane: int, strategy: dict[str, Any]) -> dict[str, Any]:
    packs = [(0, plane, [sample]) for sample in range(3)]
    seen = Seen()
    made = runs.fit(
        SIX,
        LENGTHS,
        3,
        {"scheduler": GivenPlan(plane, packs), **strategy},
        make=lambda config: runs.SmallGPT(config, extra=seen),
    )
    return made | {"seen": seen.lengths}


@pytest.fixture(scope="module")
def expected(ranks):
    return ranks.run(job, 1, 1, {})[0]


@pytest.mark.parametrize(
    ("world", "plane", "stages", "tensor"),
    [
        pytest.param(2, 1, 2, 1, marks=pytest.mark.slow),
        pytest.param(6, 2, 3, 1, marks=pytest.mark.slow),
        (6, 1, 3, 2),
        (4, 1, 2, 2),
        pytest.param(6, 1, 6, 1, marks=pytest.mark.slow),
    ],
)
def test_micro_batches_of_any_length_go_through_and_every_stage_knows_their_borders(
    ranks, expected, world, plane, stages, tensor
):
    strategy = {"pipeline_model_parallel_size": stages, "tensor_model_parallel_size": tensor}
    for own in ranks.run(job, world, plane, strategy):
        assert own["seen"] == [(8,), (16,), (4,)]
        assert_same(own, expected, 1e-9)
