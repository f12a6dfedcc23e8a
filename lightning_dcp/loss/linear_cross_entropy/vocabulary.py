"""A vocabulary whose rows are shared out over a tensor-parallel group, in the order of its ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dcp.errors import Problem
from lightning_dcp.loss.linear_cross_entropy.matmul import wide_dtype
from lightning_dcp.loss.linear_cross_entropy.once import refuse_create_graph
from lightning_dcp.loss.linear_cross_entropy.statistics import Statistics

_WORDS = ("problems", "tokens", "rows of the head weight", "gradients of hidden and weight", "a sum over the targets")
"""What ranks tell each other before they compute."""


class _SummedGradient(torch.autograd.Function):
    """The identity; the gradient is summed over the group, in float32 or better."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        refuse_create_graph()
        total = grad.to(wide_dtype(grad.dtype), memory_format=torch.contiguous_format, copy=True)
        dist.all_reduce(total, group=ctx.group)
        return total.to(grad.dtype), None


class _Gathered(torch.autograd.Function):
    """One tensor of each rank, ``[size, ...]``; each rank keeps the gradient of its own, for all have the same loss."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.rank = dist.get_rank(group)
        received = x.new_empty((dist.get_world_size(group), *x.shape))
        dist.all_gather(list(received.unbind()), x.contiguous(), group=group)
        return received

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        refuse_create_graph()
        return grad[ctx.rank], None


def enter_vocabulary(hidden: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Hidden states for a product with a share of the rows: unchanged, their gradient is summed over the group."""
    return _SummedGradient.apply(hidden, group)


def own_labels(labels: Tensor, rows: int, group: dist.ProcessGroup) -> Tensor:
    """Labels as rows of this rank's share; -1 where the target lies elsewhere or there is none."""
    local = labels - dist.get_rank(group) * rows
    return torch.where((labels >= 0) & (local >= 0) & (local < rows), local, -1)


def join_vocabulary(local: Statistics, labels: Tensor, rows: int, group: dist.ProcessGroup) -> Statistics:
    """Statistics over the whole vocabulary from those over each rank's share.

    With L_r the log-sum-exp of share r and w_r its softmax over r, the log-probability of a word of share r is
    ``log p = log p_r + log w_r``, and the entropy is ``sum_r w_r (H_r - log w_r)`` (the chain rule of entropy).

    Args:
        local: over this rank's rows, ``[T]`` each.
        labels: int64 ``[T]``, ids of the whole vocabulary; negative where a token has no target.
        rows: rows of each rank.
        group: the ranks, in the order of their shares.
    """
    shares = [_unstacked(part, local) for part in _Gathered.apply(_stacked(local), group).unbind()]
    lse = torch.stack([share.logsumexp for share in shares if share.logsumexp is not None])
    log_weights = lse.log_softmax(0)
    owner = (labels.clamp(min=0) // rows)[None]
    log_probs = torch.stack([share.log_prob for share in shares]) + log_weights
    entropies = [share.entropy for share in shares if share.entropy is not None]
    means = [share.mean_log_prob for share in shares if share.mean_log_prob is not None]
    return Statistics(
        torch.where(labels >= 0, log_probs.gather(0, owner)[0], 0),
        lse.logsumexp(0),
        (log_weights.exp() * (torch.stack(entropies) - log_weights)).sum(0) if entropies else None,
        (torch.stack(means) + log_weights).mean(0) if means else None,
    )


def _stacked(local: Statistics) -> Tensor:
    return torch.stack([part for part in local if part is not None])


def _unstacked(stacked: Tensor, like: Statistics) -> Statistics:
    rows = iter(stacked.unbind())
    log_prob, *others = (None if part is None else next(rows) for part in like)
    return Statistics(stacked[0] if log_prob is None else log_prob, *others)


def membership_problems(group: dist.ProcessGroup) -> list[Problem]:
    """Whether this rank is in the group at all: ``torch.distributed.new_group`` gives strangers a token."""
    if dist.get_rank(group) >= 0:
        return []
    return [Problem("a vocabulary over tp_group", "a rank that is not of it", "pass the group that this rank is in")]


def group_problems(
    group: dist.ProcessGroup, hidden: Tensor, weight: Tensor, targets: Tensor, problems: list[Problem]
) -> list[Problem]:
    """What differs between the ranks although it must not; every rank raises if one has a problem.

    Args:
        group: the ranks.
        hidden: ``[..., H]``, on this rank.
        weight: ``[V / size, H]``, this rank's rows.
        targets: ``[...]``, on this rank.
        problems: what this rank has found by itself.
    """
    own = torch.zeros(len(_WORDS), dtype=torch.int64, device=hidden.device)
    own[0] = len(problems)
    if not problems:  # else shapes mean nothing
        flat = targets.detach().reshape(-1).long()
        wanted = 2 * hidden.requires_grad + weight.requires_grad if torch.is_grad_enabled() else 0
        own[1:4] = torch.tensor([len(flat), len(weight), wanted])
        own[4] = (flat * torch.arange(1, len(flat) + 1, device=flat.device)).sum()
    received = own.new_empty((dist.get_world_size(group), len(own)))
    dist.all_gather(list(received.unbind()), own, group=group)
    return _differences(received.tolist(), bool(problems))


def _differences(received: list[list[int]], has_own: bool) -> list[Problem]:
    columns = list(zip(*received, strict=True))
    if any(columns[0]):
        faulty = [rank for rank, count in enumerate(columns[0]) if count]
        found = f"arguments that are refused on ranks {faulty} of the group"
        return [] if has_own else [Problem("a vocabulary over tp_group", found, "see the error of those ranks")]
    remedy = (
        "give every rank the same tokens and targets (gather them first under sequence parallelism), and weights of as "
        "many rows"
    )
    return [
        Problem(f"{word}: the same on all ranks of tp_group", f"{list(values)}, by rank", remedy)
        for word, values in zip(_WORDS[1:], columns[1:], strict=True)
        if len(set(values)) > 1
    ]
