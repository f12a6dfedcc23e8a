"""What users do around a Megatron-Core model: weight averaging, other precisions, gathered heads, failing set-ups."""

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import WeightAveraging
from torch.optim.swa_utils import get_ema_avg_fn

from tests.megatron import runs
from tests.support.training import assert_same

LENGTHS = (13, 5, 9, 3)
LIMIT = {"max_seqlen_per_dp_cp_rank": 16}
PP = {"pipeline_model_parallel_size": 2}
TP = {"tensor_model_parallel_size": 2}


def averaged(strategy: dict[str, Any]) -> dict[str, Any]:
    average = WeightAveraging(avg_fn=get_ema_avg_fn(0.5))
    return runs.fit(
        runs.DENSE, LENGTHS, 2, LIMIT | strategy, make=lambda c: runs.SmallGPT(c, lr=0.1, extra=average), max_epochs=2
    )


@pytest.mark.slow
def test_weights_are_averaged_as_in_one_process(ranks):
    expected = ranks.run(averaged, 1, {})[0]
    for own in ranks.run(averaged, 4, PP | TP):
        assert_same(own, expected, 1e-9)


class Gathered(runs.SmallGPT):
    """A head that gathers its logits by itself, as some providers ask for."""

    def provider(self, *args: Any, **kwargs: Any) -> Any:
        model = super().provider(*args, **kwargs)
        if model.post_process:
            model.parallel_output, model.output_layer.gather_output = False, True
        return model


def losses(make: type, strategy: dict[str, Any], precision: str) -> dict[str, Any]:
    return runs.fit(runs.DENSE, LENGTHS, 4, LIMIT | strategy, make=make, precision=precision, module={"logits": False})


def test_a_head_that_would_gather_gives_the_same_losses(ranks):
    expected = ranks.run(losses, 1, runs.SmallGPT, {}, "32-true")[0]
    for own in ranks.run(losses, 2, Gathered, TP, "32-true"):
        assert_same(own, expected, 1e-5)


class OtherDtype(runs.SmallGPT):
    def transformer_config(self) -> Any:
        config = super().transformer_config()
        config.params_dtype = config.pipeline_dtype = torch.float32
        return config


class FailsOnOneRank(runs.SmallGPT):
    def configure_model(self) -> None:
        if self.trainer.global_rank == 1:
            raise RuntimeError("no such file: weights")
        super().configure_model()


@pytest.mark.parametrize(
    ("make", "precision", "words"),
    [
        (OtherDtype, "64-true", "pipeline_dtype=torch.float32"),
        (runs.SmallGPT, "bf16-mixed", "use bf16-true or 32-true"),
        (FailsOnOneRank, "64-true", "no such file: weights"),
    ],
)
def test_what_cannot_run_is_told_on_all_ranks(ranks, make, precision, words):
    outcomes = ranks.run_all(losses, 2, make, PP, precision, timeout=60)
    assert all(not ok and words in text for ok, text in outcomes), outcomes
