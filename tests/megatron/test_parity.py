"""One process against tensor, sequence, pipeline and expert parallelism, with mixed CP sizes in one step."""

import pytest

from lightning_dcp import ConfigurationError
from lightning_dcp.models.megatron.weights import weights_of
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


@pytest.mark.parametrize(("tensor", "context"), [(2, 1), (1, 2), (2, 2)])
def test_the_shown_loss_is_the_same_with_static_context_parallelism(ranks, tensor, context):
    expected = ranks.run(static, 1, 1, 1)[0]
    assert {"train_loss"} <= expected["logged"].keys()
    for own in ranks.run(static, tensor * context, tensor, context):
        assert_same(own, expected, 1e-9)
        assert {size for sizes in own["cp_sizes"] for size in sizes} == {context}


BIASED = runs.MOE | {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
"""Experts whose biases move with their tokens, frozen or not."""


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


def frozen_runs(world, layout):
    return {
        half[0]: job(BIASED, world, layout, make=Frozen, module={"frozen": half}, max_epochs=2)
        for half in (LOWER, UPPER)
    }


@pytest.mark.parametrize(
    ("world", "layout"),
    [(2, {"pipeline_model_parallel_size": 2}), pytest.param(4, LAYOUTS["VPP2xPP2"][1], marks=pytest.mark.slow)],
    ids=["PP2", "VPP2xPP2"],
)
def test_a_stage_may_be_frozen_whole(ranks, world, layout):
    expected = ranks.run(frozen_runs, 1, 1, {})[0]
    for found in ranks.run(frozen_runs, world, world, layout):
        for half, own in found.items():
            assert_same(own, expected[half], 1e-9)
            moved = [w for name, w in own["weights"].items() if name.endswith("expert_bias")]
            assert len(moved) == 4
            assert all(bias.any() for bias in moved)


class HalfFrozen(runs.SmallGPT):
    """Freezes by the names of this rank's own parameters."""

    def __init__(self, config, *, name, **options):
        super().__init__(config, share_embeddings_and_output_weights=True, **options)
        self.name = name

    def configure_model(self):
        super().configure_model()
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(self.name not in name)


def half_frozen():
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
