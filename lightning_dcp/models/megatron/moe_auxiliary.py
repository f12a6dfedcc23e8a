"""Auxiliary losses of mixtures of experts: their parts on a rank, how they reach the gradient, and their values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_dcp.models.megatron.model import MegatronModel
from lightning_dcp.models.megatron.moe_rows import RouterRows

BALANCING = {"aux_loss": "load_balancing_loss", "seq_aux_loss": "seq_load_balancing_loss"}
"""Names of the load-balancing losses' values, by ``moe_router_load_balancing_type``."""
Z_LOSS = "z_loss"


def balancing_coefficients(config: Any) -> dict[str, float]:
    """The coefficient of each load-balancing loss of a TransformerConfig that is not zero, by its type."""
    kinds, coefficients = config.moe_router_load_balancing_type, config.moe_aux_loss_coeff
    if isinstance(kinds, str):
        kinds, coefficients = [kinds], [coefficients]
    return {kind: c for kind, c in zip(kinds, coefficients, strict=True) if kind in BALANCING and c}


def auxiliary_names(config: Any) -> list[str]:
    """The names of the auxiliary losses that a TransformerConfig asks for."""
    if not config.num_moe_experts:
        return []
    names = [BALANCING[kind] for kind in balancing_coefficients(config)]
    return [*names, Z_LOSS] if config.moe_z_loss_coeff else names


def load_balancing_parts(
    kinds: Mapping[str, float], scores: Tensor, chosen: Tensor, rows: RouterRows, topk: int
) -> dict[str, Tensor]:
    """This rank's part of each load-balancing loss, without its coefficient; the parts of all ranks add up to it.

    Collective over the ranks that hold the call's tokens, whose counts go into the other factor of each rank's part.

    Args:
        kinds: which losses: ``aux_loss``, ``seq_aux_loss``.
        scores: the router's normalised score of each expert, ``[rows, experts]``; zero where a row is not real.
        chosen: the experts of each token by these scores, bool ``[rows, experts]``; none where a row is not real.
        rows: what the rows are.
        topk: experts of each token, k.

    Returns:
        Scalars. ``aux_s = E / (L_s^2 k) * sum_i count_i(s) sum_t p_i(t)`` of each sample, weighted by ``L_s / batch_tokens``
        (``aux_loss``) or ``1 / batch_samples`` (``seq_aux_loss``).
    """
    counts = chosen.new_zeros((rows.num_samples, chosen.shape[1]), dtype=torch.int64)
    counts = rows.summed(counts.index_add_(0, rows.sample, chosen.to(torch.int64))).to(scores.dtype)
    lengths = counts.sum(1, keepdim=True).div(topk).clamp(min=1)
    parts = {}
    for kind in kinds:
        share = lengths / rows.batch_tokens if kind == "aux_loss" else 1 / rows.batch_samples
        factors = counts * (share * counts.shape[1] / (lengths.square() * topk))
        parts[kind] = (scores * factors[rows.sample]).sum()
    return parts


def z_loss_part(logits: Tensor, rows: RouterRows) -> Tensor:
    """This rank's part of the mean over the batch's tokens of ``logsumexp(logits)^2`` (Zoph et al., 2022, eq. 5).

    Args:
        logits: ``[rows, experts]``.
        rows: what the rows are.
    """
    squares = torch.logsumexp(logits, dim=-1).square()
    return torch.where(rows.real, squares, 0).sum() / rows.batch_tokens


def attach(carrier: Tensor, objective: Tensor, scale: float, entered: Callable[[], None]) -> Tensor:
    """The identity of a tensor, whose backward also starts that of an objective.

    Args:
        carrier: the tensor, on the way to the step's loss.
        objective: a scalar.
        scale: the gradient of the objective.
        entered: called by each backward: once for each micro-batch, whether layers are recomputed or not, and not at all
            where nothing is learnt.
    """
    return _Attach.apply(carrier, objective, scale, entered)


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, carrier: Tensor, objective: Tensor, scale: float, entered: Callable[[], None]) -> Tensor:
        ctx.gradient, ctx.entered = torch.full_like(objective, scale), entered
        return carrier.view_as(carrier)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        ctx.entered()
        return grads[0], ctx.gradient, None, None


def routers_of(model: nn.Module) -> Iterator[Any]:
    """The routers of our kind in this rank's part of a model."""
    return (layer for layer in model.modules() if hasattr(layer, "auxiliary"))


def auxiliary_losses(model: MegatronModel) -> dict[str, Tensor]:
    """The auxiliary losses of all that went through backward since the last call. Collective over the world.

    Called after each batch they are what one process that sees the whole batch would have computed; over several batches
    they add up.

    Args:
        model: the model.

    Returns:
        ``load_balancing_loss``, ``seq_load_balancing_loss`` and ``z_loss``, those that the config asks for: the mean over
        layers, without coefficients, the same on every rank.
    """
    names, routers = auxiliary_names(model.config), list(routers_of(model))
    device = next(model.parameters()).device
    sums = torch.zeros(len(names) + 1, dtype=torch.float64, device=device)
    for router in routers:
        for number, name in enumerate(names):
            sums[number] += router.auxiliary.pop(name, 0.0)
    sums[-1] = len(routers)
    dist.all_reduce(sums)
    layers = sums[-1] * model.config.pipeline_model_parallel_size / dist.get_world_size()
    return {name: sums[number] / layers for number, name in enumerate(names)}
