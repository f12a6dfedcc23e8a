"""Mixtures of experts: expert parallelism against one process."""

from unittest.mock import patch

import pytest

from lightning_dcp import ConfigurationError, MegatronModel
from lightning_dcp.models.megatron import compat
from tests.megatron import runs
from tests.support.plans import GivenPlan
from tests.support.training import assert_same

LENGTHS = (13, 5, 1, 3, 7, 2)
"""A pack of one token has no target, experts without a token, and on two ranks a shard that is empty."""
ROUNDS = {
    1: [[(0, 1, [0])], [(0, 1, [1, 3])], [(0, 1, [2])], [(0, 1, [4, 5])]],
    2: [[(0, 2, [0])], [(0, 1, [1]), (1, 1, [3])], [(0, 2, [2])], [(0, 2, [4, 5])]],
    4: [[(0, 4, [0])], [(0, 2, [1]), (2, 1, [3]), (3, 1, [5])], [(0, 4, [2])], [(0, 4, [4])]],
}
"""By ranks of the plane: four micro-batches of mixed CP sizes."""
SEQUENCE_PARALLEL = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
RECOMPUTE_MOE = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
LAYOUTS = {
    "EP2": (4, {"expert_model_parallel_size": 2}, RECOMPUTE_MOE),
    "EP2xTP2+SP": (4, {"expert_model_parallel_size": 2, **SEQUENCE_PARALLEL}, {}),
    "EP2xTP2+SP, whole experts": (
        4,
        {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1, **SEQUENCE_PARALLEL},
        RECOMPUTE,
    ),
    "EP2xPP2": (4, {"expert_model_parallel_size": 2, "pipeline_model_parallel_size": 2}, RECOMPUTE),
}
SMALL = runs.MOE | {"num_layers": 2}


def given(ranks, reverse=False):
    rounds = ROUNDS[ranks]
    return GivenPlan(ranks, [pack for packs in (rounds[::-1] if reverse else rounds) for pack in packs])


def job(config, world, strategy, reverse=False, **options):
    sizes = strategy.get("tensor_model_parallel_size", 1) * strategy.get("pipeline_model_parallel_size", 1)
    return runs.fit(config, LENGTHS, len(LENGTHS), {"scheduler": given(world // sizes, reverse), **strategy}, **options)


@pytest.fixture(scope="module")
def whole(ranks):
    return ranks.run(job, 1, SMALL, 1, {})[0]


QUICK = [("EP2", False), ("EP2xTP2+SP", False), ("EP2xTP2+SP", True), ("EP2xPP2", False)]
RUNS = [
    pytest.param(layout, reverse, marks=[pytest.mark.slow] * ((layout, reverse) not in QUICK))
    for layout in LAYOUTS
    for reverse in (False, True)
]


@pytest.mark.parametrize(("layout", "reverse"), RUNS)
def test_experts_on_several_ranks_agree_with_one_process(ranks, whole, layout, reverse):
    """Loss, gradients (those of experts among them) and weights."""
    world, strategy, config = LAYOUTS[layout]
    for own in ranks.run(job, world, SMALL | config, world, strategy, reverse):
        assert_same(own, whole, 1e-9)


def joined_job():
    """Experts of Megatron-Core's legacy grouped layer, whose kernels need a GPU: it is made and not called."""
    with patch("megatron.core.transformer.moe.grouped_gemm_util.assert_grouped_gemm_is_available"):
        try:
            runs.fit(SMALL | {"moe_grouped_gemm": True}, LENGTHS, len(LENGTHS), {}, make=MegatronModule)
        except ConfigurationError as error:
            return str(error)


class MegatronModule(runs.SmallGPT):
    """A model as of the user's own making: its config is seen when it is made, and its weights are what Megatron-Core draws."""

    def configure_model(self):
        self.model = MegatronModel(self.provider)


@pytest.mark.skipif(
    compat.find("megatron.core.transformer.moe.experts.GroupedMLP") is None, reason="a release without it"
)
def test_experts_in_one_parameter_are_refused_at_set_up(ranks):
    (told,) = ranks.run(joined_job, 1)
    assert "(GroupedMLP) and 1 more" in told
    assert "moe_grouped_gemm=False" in told
