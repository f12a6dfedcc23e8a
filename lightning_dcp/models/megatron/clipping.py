"""The norm of gradients that lie on several ranks, and clipping by it: each parameter counts once."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_dcp.models.megatron.gradients import is_expert, is_split
from lightning_dcp.models.megatron.model import MegatronModel, megatron_models
from lightning_dcp.parallel.clock import WaitClock
from lightning_dcp.parallel.groups import ParallelGroups

Counted = list[tuple[Tensor, int]]
"""Gradients, each with the number of ranks that hold the same values; 0 for one that another speaks for."""


def gradient_norm(
    gradients: Counted, clock: WaitClock, *, device: torch.device, norm_type: float, spread: bool
) -> Tensor:
    """The norm of gradients that have been reduced, as one process with the whole model has it.

    Collective over the world where ranks hold different weights. A rank's part of a split weight counts as such; what
    several ranks hold a copy of counts once: norms, routers, biases behind row-parallel layers, weights outside
    Megatron-Core models, everything over the plane. NaN or infinity on any rank gives NaN or infinity on all.

    Args:
        gradients: this rank's, by :func:`counted`.
        clock: counts the wait for other ranks.
        device: where the norm will lie.
        norm_type: p of the p-norm, above 0; ``math.inf`` for the largest entry.
        spread: whether ranks hold different gradients.

    Returns:
        float64 without dimensions, the same on all ranks.
    """
    by_copies: dict[int, list[Tensor]] = defaultdict(list)
    for gradient, copies in gradients:
        if copies:
            by_copies[copies].append(_norm(gradient, norm_type).to(device, torch.float64))
    norms = {n: _norm(torch.stack(own), norm_type) for n, own in by_copies.items()}
    if math.isinf(norm_type):
        return _largest([*norms.values()], device, clock, spread)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for copies, norm in norms.items():
        total += norm**norm_type / (copies if spread else 1)
    if spread:
        with clock.waiting():
            dist.all_reduce(total)
    return total ** (1 / norm_type)


def clip_by_norm(parameters: Iterable[Tensor], max_norm: float, norm: Tensor) -> None:
    """Scale this rank's gradients by ``min(1, max_norm / (norm + 1e-6))``, as torch's ``clip_grad_norm_``.

    A norm of NaN makes all gradients NaN, one of infinity makes them 0 (and NaN where they are infinite); on all ranks.
    """
    held = [p for p in parameters if p.grad is not None]
    for dtype in {p.grad.dtype for p in held if p.grad is not None}:
        own = norm.to(torch.promote_types(dtype, torch.float32))
        nn.utils.clip_grads_with_norm_([p for p in held if p.grad is not None and p.grad.dtype == dtype], max_norm, own)


def _largest(norms: list[Tensor], device: torch.device, clock: WaitClock, spread: bool) -> Tensor:
    """The largest of all ranks' norms, or NaN; a reduction by maximum may lose NaN on its way."""
    own = torch.stack(norms).max() if norms else torch.zeros((), dtype=torch.float64, device=device)
    if not spread:
        return own
    every = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    with clock.waiting():
        dist.all_gather(every, own)
    return torch.stack(every).max()


def _norm(values: Tensor, norm_type: float) -> Tensor:
    """Summed in float32 or better, since a sum of many squares in bfloat16 stops growing; values are widened one by one."""
    norm: Tensor = torch.linalg.vector_norm(values, norm_type, dtype=torch.promote_types(values.dtype, torch.float32))
    return norm


def counted(parameters: Iterable[nn.Parameter], module: nn.Module, groups: ParallelGroups) -> Counted:
    """The gradients of parameters with the number of ranks that hold the same.

    Args:
        parameters: this rank's; those without a gradient are left out.
        module: the whole module; what is not of a :class:`MegatronModel` of its is the same on all ranks.
        groups: the groups in force.
    """
    known = {id(p): n for model in megatron_models(module).values() for p, n in copies_of(model, groups)}
    everywhere = dist.get_world_size()
    return [(p.grad, known.get(id(p), everywhere)) for p in parameters if p.grad is not None]


def copies_of(model: MegatronModel, groups: ParallelGroups) -> Iterator[tuple[nn.Parameter, int]]:
    """A model's parameters with their number of copies; 0 for an embedding that an earlier stage speaks for."""
    topology, plane = groups.topology, dist.get_world_size(groups.plane)
    for name, parameter in model.named_parameters():
        if getattr(parameter, "shared", False):
            yield parameter, 0
        elif is_expert(parameter):
            # Experts' weights are split; of their biases, those of the row-parallel layer are not.
            whole = name.rpartition(".")[2].startswith("bias") and ".linear_fc2." in name
            holders = dist.get_world_size(groups.expert_data)
            yield parameter, holders * (topology.expert_tensor_ranks if whole else 1)
        else:
            yield parameter, plane * (1 if is_split(parameter) else topology.tensor_model_parallel_size)
