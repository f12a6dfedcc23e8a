"""Gradients and first values of models whose ranks hold different weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_dcp.errors import Problem, raise_problems
from lightning_dcp.models.megatron.model import MegatronModel, megatron_models
from lightning_dcp.parallel.clock import WaitClock
from lightning_dcp.parallel.gradients import all_reduce_gradients
from lightning_dcp.parallel.groups import ParallelGroups


def is_expert(parameter: Tensor) -> bool:
    """Whether a weight belongs to experts, which lie on some ranks of the plane only."""
    return not getattr(parameter, "allreduce", True)


def reduce_gradients(
    module: nn.Module, groups: ParallelGroups, clock: WaitClock, models_own: Callable[[WaitClock], None] | None = None
) -> None:
    """Sum the gradients of a step over all ranks that hold the same weights. Collective over the world.

    Dense weights are summed over the plane, experts over the ranks that hold the same ones. Then Megatron-Core's
    ``finalize_model_grads`` does what it does after a backward: it adds up the gradients of norms and routers over
    tensor-parallel ranks, those of shared embeddings over the first and the last stage, and moves the experts' biases; also
    where a rank's own weights are all frozen. Weights outside the models lie on every stage, and get their gradients from the
    last; they are summed over the stages, so that the copies stay the same.

    Args:
        module: the module.
        groups: the groups in force.
        clock: counts the wait for other ranks.
        models_own: sums the models' gradients in another way, which has them in buffers.

    Raises:
        ConfigurationError: of a shared embedding one stage's copy is frozen and the other's is not.
    """
    models = [*megatron_models(module).values()]
    inside = {id(p) for model in models for p in model.parameters()}
    outside = [p for p in module.parameters() if id(p) not in inside]
    all_reduce_gradients(outside, groups.plane, clock)
    if groups.pipeline is not None:
        all_reduce_gradients(outside, groups.pipeline, clock)
    if models_own is None:
        _reduce_models(models, groups, clock)
    else:
        models_own(clock)


def _reduce_models(models: Sequence[MegatronModel], groups: ParallelGroups, clock: WaitClock) -> None:
    trainable = [p for model in models for p in model.parameters() if p.requires_grad]
    for parameter in trainable:
        if parameter.grad is None:  # as Megatron-Core's gradient buffers, which are there before a token comes
            parameter.grad = torch.zeros_like(parameter)
    all_reduce_gradients([p for p in trainable if not is_expert(p)], groups.plane, clock)
    if groups.expert_data is not None:
        all_reduce_gradients([p for p in trainable if is_expert(p)], groups.expert_data, clock)
    for model in models_that_train(models, groups, clock):
        finalize(model.chunks, clock)


def models_that_train(models: Sequence[MegatronModel], groups: ParallelGroups, clock: WaitClock) -> list[MegatronModel]:
    """The models of which any rank has weights that are not frozen. Collective over the world where ranks hold different weights.

    All ranks have to finish the gradients of these: one whose own weights are all frozen would leave others waiting, and the
    biases of its experts where they are.

    Args:
        models: this rank's parts of all models.
        groups: the groups in force.
        clock: counts the wait for other ranks.

    Raises:
        ConfigurationError: of a shared embedding one stage's copy is frozen and the other's is not.
    """
    if not models:
        return []
    flags = torch.tensor([_flags(model) for model in models], dtype=torch.int32, device=models[0].device_type)
    if groups.topology.is_model_parallel:
        with clock.waiting():
            dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    found = flags.tolist()
    raise_problems([_half_frozen(groups, first=bool(f)) for _, f, last, shared in found if shared and f != last])
    return [model for model, (trains, *_) in zip(models, found, strict=True) if trains]


def _flags(model: MegatronModel) -> tuple[bool, bool, bool, bool]:
    """Of a rank: whether any weight trains, whether the first and the last stage's copy of an embedding do, if there are two."""
    trains = any(p.requires_grad for p in model.parameters())
    if model.config.pipeline_model_parallel_size == 1 or not model.chunk.share_embeddings_and_output_weights:
        return trains, False, False, False
    chunks: list[Any] = [*model.chunks]
    first, last = (
        any(chunk.shared_embedding_or_output_weight().requires_grad for chunk in chunks if getattr(chunk, place))
        for place in ("pre_process", "post_process")
    )
    return trains, first, last, True


def _half_frozen(groups: ParallelGroups, *, first: bool) -> Problem:
    stages = groups.topology.pipeline_model_parallel_size
    states = ("trains", "is frozen") if first else ("is frozen", "trains")
    return Problem(
        f"share_embeddings_and_output_weights=True with pipeline_model_parallel_size={stages}",
        f"two copies of one weight: embedding.word_embeddings.weight on the first stage, which {states[0]}, and "
        f"output_layer.weight on the last, which {states[1]}",
        "freeze both or none of them; they have these two names because each stage has its own parameters",
    )


def finalize(chunks: Iterable[nn.Module], clock: WaitClock) -> None:
    """Run Megatron-Core's ``finalize_model_grads`` on chunks whose gradients are summed. Collective over the world."""
    from megatron.core.distributed.finalize_model_grads import finalize_model_grads

    with clock.waiting():
        finalize_model_grads([_Chunk(chunk) for chunk in chunks])


class _Chunk:
    """A chunk as ``finalize_model_grads`` wants it: wrapped for data parallelism, with the sums already done."""

    ddp_config = SimpleNamespace(use_megatron_fsdp=False)

    def __init__(self, chunk: nn.Module) -> None:
        self.chunk = chunk

    def __getattr__(self, name: str) -> Any:
        return getattr(self.chunk, name)

    def finish_grad_sync(self, **unused: Any) -> None:
        """Nothing is left to do."""


def sync_parameters(module: nn.Module, groups: ParallelGroups) -> None:
    """Give all ranks that hold the same weights the values of the first of them. Collective over the world.

    What the DDP wrapper of other strategies does from rank 0, which here holds the weights of one place only.
    """
    models = [*megatron_models(module).values()]
    inside = {id(t) for model in models for t in (*model.parameters(), *model.buffers())}
    tensors = [*module.parameters(), *module.buffers()]
    outside = [t for t in tensors if id(t) not in inside]
    held = [t for t in tensors if id(t) in inside]
    _broadcast(outside, dist.group.WORLD)
    _broadcast([t for t in held if not is_expert(t)], groups.plane)
    if groups.expert_data is not None:
        _broadcast([t for t in held if is_expert(t)], groups.expert_data)
    if groups.tensor is not None:
        _broadcast([t for t in held if not is_split(t)], groups.tensor)


def is_split(tensor: Tensor) -> bool:
    """Whether tensor-parallel ranks hold different parts of a weight."""
    return bool(getattr(tensor, "tensor_model_parallel", False)) or is_expert(tensor)


@torch.no_grad()
def _broadcast(tensors: Sequence[Tensor], group: Any) -> None:
    if dist.get_world_size(group) == 1:
        return
    first = dist.get_process_group_ranks(group)[0]
    for tensor in tensors:
        dist.broadcast(tensor.data, first, group=group)
