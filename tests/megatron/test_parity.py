"""One process against tensor, sequence, pipeline and expert parallelism, with mixed CP sizes in one step."""

import pytest

from tests.megatron import runs
from tests.support.plans import GivenPlan
from tests.support.training import assert_same

LENGTHS = (13, 5, 9, 3, 7, 11)
PLANS = {
    1: [(0, 1, [0]), (0, 1, [1, 2]), (0, 1, [3]), (0, 1, [4, 5])],
    2: [(0, 2, [0]), (0, 1, [1]), (1, 1, [2, 3]), (0, 2, [4]), (0, 2, [5])],
    4: [(0, 4, [0]), (0, 2, [1]), (2, 1, [2]), (3, 1, [3]), (0, 4, [4]), (0, 4, [5])],
}
"""By ranks of the plane: four micro-batches of mixed sizes."""
LAYOUTS = {
    "TP2": (4, {"tensor_model_parallel_size": 2}),
    "TP2+SP": (4, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "PP2": (4, {"pipeline_model_parallel_size": 2}),
    "PP2xTP2": (4, {"pipeline_model_parallel_size": 2, "tensor_model_parallel_size": 2}),
    "PP2xTP2+SP": (8, {"pipeline_model_parallel_size": 2, "tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "VPP2xPP2": (4, {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}),
}


def given(ranks, reverse=False):
    packs = PLANS[ranks]
    rounds = {2: [[0], [1, 2], [3], [4]], 4: [[0], [1, 2, 3], [4], [5]], 1: [[0], [1], [2], [3]]}[ranks]
    order = [i for r in (reversed(rounds) if reverse else rounds) for i in r]
    return GivenPlan(ranks, [packs[i] for i in order])


def job(config, world, strategy, reverse=False, **options):
    sizes = strategy.get("tensor_model_parallel_size", 1) * strategy.get("pipeline_model_parallel_size", 1)
    return runs.fit(config, LENGTHS, len(LENGTHS), {"scheduler": given(world // sizes, reverse), **strategy}, **options)


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
