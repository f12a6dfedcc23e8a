"""One process against tensor, sequence, pipeline and expert parallelism, with mixed CP sizes in one step."""

from unittest.mock import patch

import pytest
import torch

from lightning_dcp import ConfigurationError
from lightning_dcp.models.megatron.weights import weights_of
from lightning_dcp.parallel.watchdog import Watchdog
from tests.megatron import runs
from tests.megatron.runs import LENGTHS, given, plane_of
from tests.support.training import assert_same

LAYOUTS = {
    "TP2": (4, {"tensor_model_parallel_size": 2}),
    "TP2+SP": (4, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "PP2": (4, {"pipeline_model_parallel_size": 2}),
    "PP2xTP2": (4, {"pipeline_model_parallel_size": 2, "tensor_model_parallel_size": 2}),
    "PP2xTP2+SP": (8, {"pipeline_model_parallel_size": 2, "tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "VPP2xPP2": (4, {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}),
}


def job(config, world, strategy, reverse=False, **options):
    scheduler = given(plane_of(world, strategy), reverse)
    return runs.fit(config, LENGTHS, len(LENGTHS), {"scheduler": scheduler, **strategy}, **options)


@pytest.fixture(scope="module")
def dense(ranks):
    return ranks.run(job, 1, runs.DENSE, 1, {})[0]


@pytest.mark.parametrize("reverse", [False, True], ids=["", "reversed"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_dense_models_agree_with_one_process(ranks, dense, layout, reverse):
    world, strategy = LAYOUTS[layout]
    for own in ranks.run(job, world, runs.DENSE, world, strategy, reverse):
        assert_same(own, dense, 1e-9)


def static(tensor, context):
    strategy = {"dynamic_context_parallel": False, "context_parallel_size": context}
    return runs.fit(runs.DENSE, LENGTHS, 3, strategy | {"tensor_model_parallel_size": tensor})


@pytest.mark.parametrize(
    ("tensor", "context"), [*(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((2, 1), (1, 2))), (2, 2)]
)
def test_the_shown_loss_is_the_same_with_static_context_parallelism(ranks, tensor, context):
    expected = ranks.run(static, 1, 1, 1)[0]
    assert {"train_loss"} <= expected["logged"].keys()
    for own in ranks.run(static, tensor * context, tensor, context):
        assert_same(own, expected, 1e-9)
        assert {size for sizes in own["cp_sizes"] for size in sizes} == {context}


BIASED = runs.MOE | {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
"""Experts whose biases move at the end of a step. Exact on planes of one rank only: the sigmoid is one of float32."""


class Frozen(runs.SmallGPT):
    """Some weights of the whole model are frozen, by the beginnings of their names."""

    def __init__(self, config, *, frozen, **options):
        super().__init__(config, **options)
        self.frozen = frozen

    def configure_model(self):
        super().configure_model()
        for weight in weights_of(self.model):
            if weight.name.startswith(self.frozen):
                weight.parameter.requires_grad_(False)


LOWER = ("embedding.", "decoder.layers.0.", "decoder.layers.1.")
UPPER = ("output_layer.", "decoder.final_layernorm.", "decoder.layers.2.", "decoder.layers.3.")


def frozen_runs(config, world, layout):
    return {
        half[0]: job(config, world, layout, make=Frozen, module={"frozen": half}, max_epochs=2)
        for half in (LOWER, UPPER)
    }


def moved_biases(weights):
    """The layers whose experts' biases are not those of the start."""
    first = {name: runs.made_up(name, bias.shape).float() for name, bias in weights.items() if "expert_bias" in name}
    return {int(name.split(".")[2]) for name, bias in first.items() if not torch.equal(weights[name].float(), bias)}


@pytest.mark.parametrize(
    ("config", "world", "layout"),
    [
        pytest.param(BIASED, *(2, LAYOUTS["PP2"][1]), id="PP2"),
        pytest.param(runs.MOE, *LAYOUTS["VPP2xPP2"], id="VPP2xPP2", marks=pytest.mark.slow),
    ],
)
def test_a_stage_may_be_frozen_whole(ranks, config, world, layout):
    expected = ranks.run(frozen_runs, 1, config, 1, {})[0]
    if config is BIASED:
        assert {2, 3} <= moved_biases(expected[LOWER[0]]["weights"])
        assert {0, 1} <= moved_biases(expected[UPPER[0]]["weights"])
    for found in ranks.run(frozen_runs, world, config, world, layout):
        for half, own in found.items():
            assert_same(own, expected[half], 1e-9)


class HalfFrozen(runs.SmallGPT):
    """Freezes by the names of this rank's own parameters."""

    def __init__(self, config, *, name, **options):
        super().__init__(config, share_embeddings_and_output_weights=True, **options)
        self.name = name

    def configure_model(self):
        super().configure_model()
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(self.name not in name)


@patch.object(Watchdog, "report")  # every rank refuses, so that the first need not wait until the others have read it
def half_frozen(report):
    said = {}
    for name in ("word_embeddings", "output_layer", "layernorm"):
        try:
            job(runs.DENSE, 2, {"pipeline_model_parallel_size": 2}, make=HalfFrozen, module={"name": name})
        except ConfigurationError as error:
            said[name] = error.problems[0].found
    return said


def test_copies_of_a_shared_embedding_are_frozen_both_or_not_at_all(ranks):
    for said in ranks.run(half_frozen, 2):
        assert said == {
            "word_embeddings": "two copies of one weight: embedding.word_embeddings.weight on the first stage, which is "
            "frozen, and output_layer.weight on the last, which trains",
            "output_layer": "two copies of one weight: embedding.word_embeddings.weight on the first stage, which trains, "
            "and output_layer.weight on the last, which is frozen",
        }
