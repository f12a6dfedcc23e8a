"""What a TransformerConfig may ask of mixtures of experts that does not run on packs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lightning_dcp.errors import Problem

_CUT = "its result depends on how the batch is cut into packs and over ranks"


def moe_problems(config: Any) -> Iterator[Problem]:
    """What does not run, or would give numbers that depend on the plan.

    Random logits for benchmarks (``moe_router_force_load_balancing``) and jitter (``moe_input_jitter_eps``) are let
    through: like dropout they are drawn for each pack.

    Args:
        config: a TransformerConfig, or anything with its fields; fields that are missing are taken for unused.
    """
    experts = _field(config, "num_moe_experts")
    if not experts:
        return
    yield from _balancing_problems(config)
    yield from _capacity_problems(config)
    yield from _router_problems(config, experts)
    yield from _layout_problems(config, experts)


def _field(config: Any, name: str, default: Any = None) -> Any:
    return getattr(config, name, default)


def _balancing_problems(config: Any) -> Iterator[Problem]:
    kinds = _field(config, "moe_router_load_balancing_type", "none")
    coefficients = _field(config, "moe_aux_loss_coeff", 0.0)
    listed = [kinds] if isinstance(kinds, str) else list(kinds)
    for kind in sorted({"sinkhorn", "quantile_balancing", "global_aux_loss"} & set(listed)):
        yield Problem(
            f"moe_router_load_balancing_type={kinds!r}",
            f"{kind} takes statistics of all tokens of a micro-batch and keeps them: {_CUT}",
            "use aux_loss, seq_aux_loss or none, with moe_router_enable_expert_bias if the balance is to hold over batches",
        )
    given = None if isinstance(coefficients, int | float) else len(coefficients)
    if given != (None if isinstance(kinds, str) else len(listed)):
        yield Problem(
            f"moe_router_load_balancing_type={kinds!r}",
            f"moe_aux_loss_coeff={coefficients!r}",
            "give one coefficient for one type, and for a list of types a list of as many",
        )


def _capacity_problems(config: Any) -> Iterator[Problem]:
    for name in ("moe_expert_capacity_factor", "moe_expert_rank_capacity_factor"):
        if _field(config, name) is not None:
            yield Problem(
                f"{name}={_field(config, name)}",
                f"which tokens are dropped is decided among those of a micro-batch on a rank: {_CUT}",
                f"leave {name} at None: no token is dropped",
            )
    for name in ("moe_token_dropping", "moe_pad_expert_input_to_capacity"):
        if _field(config, name):
            yield Problem(f"{name}=True", f"tokens of a micro-batch are dropped or padded: {_CUT}", f"set {name}=False")


def _router_problems(config: Any, experts: int) -> Iterator[Problem]:
    chosen = _field(config, "moe_router_topk", 2)
    if isinstance(chosen, int) and not 1 <= chosen <= experts:
        yield Problem(f"moe_router_topk={chosen}", f"num_moe_experts={experts}", f"use 1 to {experts}")
    if _field(config, "moe_router_topk_limited_devices"):
        yield Problem(
            f"moe_router_topk_limited_devices={_field(config, 'moe_router_topk_limited_devices')}",
            "routes that depend on expert_model_parallel_size, and with them the loss",
            "use moe_router_num_groups and moe_router_group_topk",
        )


def _layout_problems(config: Any, experts: int) -> Iterator[Problem]:
    expert_parallel, tensor_parallel = (
        _field(config, name, 1) or 1 for name in ("expert_model_parallel_size", "tensor_model_parallel_size")
    )
    if experts % expert_parallel:
        yield Problem(
            f"expert_model_parallel_size={expert_parallel}",
            f"num_moe_experts={experts}",
            "choose an expert_model_parallel_size that divides the number of experts",
        )
    if tensor_parallel > 1 and not _field(config, "sequence_parallel"):
        yield Problem(
            f"tensor_model_parallel_size={tensor_parallel} with num_moe_experts={experts}",
            "sequence_parallel=False, with which Megatron-Core trains no mixture of experts",
            "DCPStrategy(sequence_parallel=True), or tensor_model_parallel_size=1",
        )
    yield from _dispatcher_problems(config, expert_parallel, tensor_parallel)
    if _field(config, "add_bias_linear"):
        found = f"num_moe_experts={experts}: Megatron-Core's experts add biases in place, where autograd forbids it"
        yield Problem("add_bias_linear=True", found, "add_bias_linear=False")
    if _field(config, "overlap_moe_expert_parallel_comm"):
        yield Problem(
            "overlap_moe_expert_parallel_comm=True",
            "it cuts the model's call into pieces of two micro-batches, and training_step runs as a whole",
            "overlap_moe_expert_parallel_comm=False",
        )


def _dispatcher_problems(config: Any, expert_parallel: int, tensor_parallel: int) -> Iterator[Problem]:
    kind = _field(config, "moe_token_dispatcher_type")
    expert_tensor = _field(config, "expert_tensor_parallel_size") or tensor_parallel
    if kind == "allgather" and (expert_parallel > 1 or tensor_parallel % expert_tensor):
        yield Problem(
            "moe_token_dispatcher_type='allgather'",
            f"expert_model_parallel_size={expert_parallel} and expert_tensor_parallel_size={expert_tensor} with "
            f"tensor_model_parallel_size={tensor_parallel}: it gathers as many tokens from each rank as this one has, and "
            "ranks with other packs have other numbers",
            "moe_token_dispatcher_type='alltoall'",
        )
    if kind == "flex":
        yield Problem(
            "moe_token_dispatcher_type='flex'",
            "packs of unequal numbers of tokens: its HybridEP back end has buffers for as many as the first call had, and "
            "none of its back ends is tested with packs",
            "moe_token_dispatcher_type='alltoall'",
        )
