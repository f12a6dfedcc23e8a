"""What mixtures of experts ask for that does not run on packs."""

from types import SimpleNamespace

import pytest

from lightning_dcp.models.megatron.moe_problems import moe_problems

FINE = {
    "num_moe_experts": 8,
    "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"],
    "moe_aux_loss_coeff": [0.1, 0.1],
    "moe_token_dispatcher_type": "alltoall",
    "expert_model_parallel_size": 4,
    "tensor_model_parallel_size": 2,
    "sequence_parallel": True,
}
WRONG = {
    "sinkhorn": {"moe_router_load_balancing_type": ["sinkhorn"], "moe_aux_loss_coeff": [0.0]},
    "quantile_balancing": {"moe_router_load_balancing_type": "quantile_balancing", "moe_aux_loss_coeff": 0.0},
    "global_aux_loss": {"moe_router_load_balancing_type": ["aux_loss", "global_aux_loss"]},
    "give one coefficient": {"moe_aux_loss_coeff": 0.1},
    "a list of as many": {"moe_router_load_balancing_type": "aux_loss"},
    "moe_expert_capacity_factor=1.5": {"moe_expert_capacity_factor": 1.5},
    "moe_expert_rank_capacity_factor=2": {"moe_expert_rank_capacity_factor": 2},
    "moe_pad_expert_input_to_capacity=True": {"moe_pad_expert_input_to_capacity": True},
    "moe_token_dropping=True": {"moe_token_dropping": True},
    "divides the number of experts": {"expert_model_parallel_size": 3},
    "sequence_parallel=False": {"sequence_parallel": False},
    "moe_token_dispatcher_type='allgather'": {"moe_token_dispatcher_type": "allgather"},
    "moe_token_dispatcher_type='flex'": {"moe_token_dispatcher_type": "flex"},
    "moe_router_topk=9": {"moe_router_topk": 9},
    "moe_router_topk_limited_devices=2": {"moe_router_topk_limited_devices": 2},
    "add_bias_linear=True": {"add_bias_linear": True},
    "overlap_moe_expert_parallel_comm=True": {"overlap_moe_expert_parallel_comm": True},
}


def problems(**fields):
    return list(moe_problems(SimpleNamespace(**FINE | fields)))


@pytest.mark.parametrize("words", WRONG)
def test_what_depends_on_the_cut_or_cannot_run_is_a_problem(words):
    (problem,) = problems(**WRONG[words])
    assert words in str(problem)


def test_all_problems_come_at_once_and_none_without_experts():
    fields = {name: value for wrong in WRONG.values() for name, value in wrong.items()}
    assert len(problems(**fields)) >= 8
    assert problems() == []
    alone = {"moe_token_dispatcher_type": "allgather", "expert_model_parallel_size": 1}
    assert problems(**alone) == problems(**alone, expert_tensor_parallel_size=1) == []
    assert problems(**fields | {"num_moe_experts": None}) == []


@pytest.mark.parametrize("size", [3, 4])
def test_gathering_dispatchers_keep_to_one_tensor_parallel_group(size):
    """Experts that are split over more ranks than a pack's tokens would gather unequal numbers of them."""
    fields = {"moe_token_dispatcher_type": "allgather", "expert_model_parallel_size": 1}
    (problem,) = problems(**fields, expert_tensor_parallel_size=size)
    assert f"expert_tensor_parallel_size={size} with tensor_model_parallel_size=2" in problem.found
