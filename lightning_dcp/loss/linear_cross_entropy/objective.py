"""From statistics of tokens to a loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lightning_dcp.loss.linear_cross_entropy.statistics import Statistics

Reduction = Literal["none", "sum", "mean"]
REDUCTIONS = ("none", "sum", "mean")


@dataclass(frozen=True)
class Objective:
    """What is asked of the tokens.

    Attributes:
        label_smoothing: share of the target that is spread over the vocabulary, 0 to 1.
        z_loss: factor of the squared log-sum-exp.
        reduction: how token losses become the loss.
    """

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    reduction: Reduction = "mean"


def token_losses(statistics: Statistics, valid: Tensor, objective: Objective) -> Tensor:
    """The loss of each token, ``[T]``; 0 where there is no target.

    ``-(1 - e) log p(target) - e mean_j log p(j) + z logsumexp^2``: label smoothing as in
    ``torch.nn.functional.cross_entropy`` (arXiv:1512.00567), z-loss as in PaLM (arXiv:2204.02311, section 5).
    """
    smoothing = objective.label_smoothing
    losses = -(1 - smoothing) * statistics.log_prob
    if smoothing and statistics.mean_log_prob is not None:
        losses = losses - smoothing * statistics.mean_log_prob
    if objective.z_loss and statistics.logsumexp is not None:
        losses = losses + objective.z_loss * statistics.logsumexp**2
    return torch.where(valid, losses, 0)


def reduced(losses: Tensor, valid: Tensor, weights: Tensor | None, reduction: Reduction) -> Tensor:
    """Weigh and reduce token losses ``[T]``.

    Args:
        losses: 0 where there is no target.
        valid: which tokens have a target.
        weights: ``[T]`` or None for 1.
        reduction: ``none`` gives ``[T]``; ``mean`` divides by the weights of the targets, NaN if there is none.
    """
    if weights is not None:
        weights = torch.where(valid, weights, 0)  # a copy, too: what the user does to theirs later changes nothing
        losses = losses * weights
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    return losses.sum() / (valid.sum() if weights is None else weights.sum())
