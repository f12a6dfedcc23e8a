"""What a step may do on model-parallel layouts: log, evaluate, predict, accumulate, recompute, leave packs without targets."""

from typing import Any

import pytest
import torch
from torchmetrics import MeanMetric

from lightning_dcp import next_token_loss
from lightning_dcp.batch.labels import shifted_labels
from lightning_dcp.data import COLLATORS
from tests.megatron import runs
from tests.support.plans import GivenPlan
from tests.support.training import RaggedTokens, assert_same, loader, trainer

LENGTHS = (13, 5, 9, 3, 7, 11, 2, 6)
SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP = {"pipeline_model_parallel_size": 2}
LAYOUTS = {
    "TP2+SP": (4, SP),
    "PP2xTP2+SP": (8, PP | SP),
    "VPP2xPP2": (4, PP | {"virtual_pipeline_model_parallel_size": 2}),
}
LIMIT = {"max_seqlen_per_dp_cp_rank": 16}
ONE = pytest.mark.parametrize("layout", ["PP2xTP2+SP", pytest.param("TP2+SP", marks=pytest.mark.slow)])


class Logging(runs.SmallGPT):
    """Logs values of several kinds, and evaluates."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.mean = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss, targets = self._loss(batch)
        self.mean(loss.detach(), weight=targets)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        self.log("twice", 2 * loss, on_step=False, on_epoch=True)
        self.log("metric", self.mean, on_step=False, on_epoch=True)
        return {"loss": loss, "extra": batch["input_ids"].sum()}

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model(input_ids=batch["input_ids"])


def whole_run(strategy: dict[str, Any], fmt: str, **options: Any) -> dict[str, Any]:
    module = Logging(runs.DENSE)
    recorder = runs.WholeGradients()
    run = trainer(strategy=LIMIT | strategy, callbacks=[recorder], **options)
    run.fit(module, loader(LENGTHS, 4, fmt), loader(LENGTHS[:3], 3, fmt))
    logged = {name: float(value) for name, value in run.callback_metrics.items()}
    metric = logged.pop("metric")
    tested = run.test(module, loader(LENGTHS[3:6], 2, fmt), verbose=False)
    predicted = run.predict(module, loader(LENGTHS[:4], 2, fmt))
    return {
        "losses": recorder.losses,
        "gradients": recorder.gradients,
        "weights": runs.whole_weights(module.model),
        "metric": metric,
        "logged": logged | {f"tested_{name}": value for results in tested for name, value in results.items()},
        "predicted": [p.values() if p.is_nested else p for p in predicted],
    }


EVALUATED = (("PP2xTP2+SP", "packed"), ("VPP2xPP2", "padded"))
"""What make test runs; the others are near-repeats."""


@pytest.mark.parametrize(
    ("layout", "fmt"),
    [
        pytest.param(layout, fmt, marks=[] if (layout, fmt) in EVALUATED else pytest.mark.slow)
        for layout in LAYOUTS
        for fmt in ("packed", "padded", "jagged")
    ],
)
def test_logged_values_evaluation_and_predictions_are_those_of_one_process(ranks, layout, fmt):
    world, strategy = LAYOUTS[layout]
    expected = ranks.run(whole_run, 1, {}, fmt)[0]
    for own in ranks.run(whole_run, world, strategy, fmt):
        assert_same(own, expected, 1e-9)
        assert own["metric"] == pytest.approx(expected["metric"], rel=1e-6)  # torchmetrics casts to float32
        for ours, right in zip(own["predicted"], expected["predicted"], strict=True):
            mask = right.abs().sum(-1) > 0 if fmt == "padded" else ...
            torch.testing.assert_close(ours[mask], right[mask], rtol=1e-9, atol=1e-9)


def dense(config: dict[str, Any], strategy: dict[str, Any], **options: Any) -> dict[str, Any]:
    return runs.fit(runs.DENSE | config, LENGTHS, 4, LIMIT | strategy, **options)


VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any], float]] = {
    "losses of the model": ({}, {"module": {"logits": False}, "precision": "32-true", "max_steps": 1}, 1e-5),
    "accumulation": ({}, {"accumulate_grad_batches": 2}, 1e-9),
    "recomputation": (
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        {},
        1e-9,
    ),
    "selective recomputation": ({"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}, {}, 1e-9),
    "learned positions": (
        {},
        {"module": {"position_embedding_type": "learned_absolute", "max_sequence_length": 16}},
        1e-9,
    ),
    "biases and LayerNorm": (
        {"normalization": "LayerNorm", "add_bias_linear": True, "gated_linear_unit": False, "activation_func": "gelu"},
        {},
        1e-9,
    ),
    "norms of queries and keys": ({"qk_layernorm": True}, {}, 1e-9),
    "windows": ({"window_size": [3, 0], "window_attn_skip_freq": 2}, {}, 1e-9),
    "sinks": ({"softmax_type": "learnable"}, {}, 1e-9),
    "one embedding for both ends": ({}, {"module": {"share_embeddings_and_output_weights": True}}, 1e-9),
}


IN_SHORT = ("losses of the model", "accumulation", "recomputation", "biases and LayerNorm")
"""What make test runs: a config as far from the other tests' as can be, and what changes the step itself."""


@ONE
@pytest.mark.parametrize(
    "variant", [pytest.param(name, marks=[] if name in IN_SHORT else pytest.mark.slow) for name in VARIANTS]
)
def test_variants_of_the_model_agree_with_one_process(ranks, layout, variant):
    config, options, tolerance = VARIANTS[variant]
    world, strategy = LAYOUTS[layout]
    expected = ranks.run(dense, 1, config, {}, **options)[0]
    for own in ranks.run(dense, world, config, strategy, **options):
        assert_same(own, expected, tolerance)


class FewTargets(RaggedTokens):
    """Only the first sample has targets."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = super().__getitem__(index)
        if index:
            sample["labels"] = torch.full_like(sample["labels"], -100)
        return sample


class MeanOverTargets(runs.SmallGPT):
    """A mean over nothing is NaN, as in plain torch code."""

    def _loss(self, batch: Any) -> Any:
        labels = shifted_labels(batch)
        loss = torch.nn.functional.cross_entropy(
            self.model(input_ids=batch["input_ids"]).flatten(0, 1), labels.flatten(), ignore_index=-100
        )
        return loss, 1


def few_targets(strategy: dict[str, Any]) -> dict[str, Any]:
    module, recorder = MeanOverTargets(runs.DENSE), runs.WholeGradients()
    run = trainer(strategy=LIMIT | strategy, callbacks=[recorder])
    data = torch.utils.data.DataLoader(FewTargets(LENGTHS), batch_size=8, collate_fn=COLLATORS["packed"])
    run.fit(module, data)
    weights = runs.whole_weights(module.model)
    return {"losses": recorder.losses, "gradients": recorder.gradients, "weights": weights, "logged": {}}


@pytest.mark.parametrize("layout", ["PP2xTP2+SP", "VPP2xPP2"])
def test_packs_without_targets_go_through_the_pipeline_and_add_nothing(ranks, layout):
    world, strategy = LAYOUTS[layout]
    expected = ranks.run(few_targets, 1, {})[0]
    assert torch.isfinite(torch.tensor(expected["losses"])).all()
    for own in ranks.run(few_targets, world, strategy):
        assert_same(own, expected, 1e-9)


class Twice(runs.SmallGPT):
    def _loss(self, batch: Any) -> Any:
        again = self.model(input_ids=batch["input_ids"])
        return next_token_loss(self.model(input_ids=batch["input_ids"]) + again, batch), 1


def called_twice(strategy: dict[str, Any]) -> dict[str, Any]:
    return runs.fit(runs.DENSE, LENGTHS, 8, LIMIT | strategy, make=Twice)


def test_a_second_call_in_a_pipeline_is_refused_plainly_and_fine_without_one(ranks):
    outcomes = ranks.run_all(called_twice, 2, PP)
    assert not any(ok for ok, _ in outcomes)
    assert any("called twice in a step under pipeline_model_parallel_size=2" in text for _, text in outcomes)
    expected = ranks.run(called_twice, 1, {})[0]
    for own in ranks.run(called_twice, 4, SP):
        assert_same(own, expected, 1e-9)


class SometimesConstant(runs.SmallGPT):
    """Some packs have nothing to learn, and a loss that does not depend on the model."""

    def _loss(self, batch: Any) -> Any:
        loss, targets = super()._loss(batch)
        return (loss if batch["input_ids"].numel() % 2 else loss.new_zeros((), requires_grad=True)), targets


def sometimes_constant(strategy: dict[str, Any]) -> dict[str, Any]:
    packs = [(0, 1, [i]) for i in range(4)]
    return runs.fit(runs.DENSE, LENGTHS[3:7], 4, {"scheduler": GivenPlan(1, packs)} | strategy, make=SometimesConstant)


def test_a_loss_that_does_not_depend_on_the_model_holds_no_stage_up(ranks):
    expected = ranks.run(sometimes_constant, 1, {})[0]
    for own in ranks.run(sometimes_constant, 2, PP, timeout=60):
        assert_same(own, expected, 1e-9)


class WithoutGradients(runs.SmallGPT):
    def _loss(self, batch: Any) -> Any:
        with torch.no_grad():
            loss, targets = super()._loss(batch)
        return loss + self.outside.sum(), targets

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.outside = torch.nn.Parameter(torch.zeros(2))


class CalledOutside(runs.SmallGPT):
    def on_train_start(self) -> None:
        self.model(input_ids=torch.ones(1, 4, dtype=torch.int64))


def wrong_call(make: type, strategy: dict[str, Any]) -> None:
    runs.fit(runs.DENSE, LENGTHS, 8, LIMIT | strategy, make=make)


@pytest.mark.parametrize(
    ("make", "words"), [(WithoutGradients, "model without gradients"), (CalledOutside, "called outside a step")]
)
def test_calls_that_stages_cannot_follow_are_refused(ranks, make, words):
    outcomes = ranks.run_all(wrong_call, 2, make, PP, timeout=60)
    assert not any(ok for ok, _ in outcomes)
    assert any(words in text for _, text in outcomes)
