"""Log-probabilities, log-sum-exps and entropies of tokens, chunk by chunk; logits are made again in the backward."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_dcp.loss.linear_cross_entropy.logits import LEAST_LOG_PROB, LogitTransform
from lightning_dcp.loss.linear_cross_entropy.matmul import operand_dtype, wide_dtype, wide_matmul
from lightning_dcp.loss.linear_cross_entropy.once import refuse_create_graph

_CHUNK_BYTES = {"cuda": 256 << 20}
_CHUNK_BYTES_ELSEWHERE = 32 << 20


class Statistics(NamedTuple):
    """What a loss needs to know of each token, ``[T]`` each, in float32 or better.

    Attributes:
        log_prob: log-probability of the target; 0 where there is none.
        logsumexp: log of the sum of the exponentials of the logits.
        entropy: of the distribution over the vocabulary, in nats; None unless asked for.
        mean_log_prob: mean log-probability over the vocabulary; None unless asked for.
    """

    log_prob: Tensor
    logsumexp: Tensor | None
    entropy: Tensor | None
    mean_log_prob: Tensor | None


_LEAST_TOKENS = 64
"""Smaller chunks only cost time."""


@dataclass(frozen=True)
class Head:
    """How tokens are computed.

    Attributes:
        transform: from the head's outputs to logits.
        dtype: of the operands of the product, as autocast or the tensors have it.
        chunk_tokens: tokens whose logits exist at the same time.
        entropy: whether the entropy is wanted.
        mean: whether the mean log-probability is wanted.
    """

    transform: LogitTransform
    dtype: torch.dtype
    chunk_tokens: int
    entropy: bool = False
    mean: bool = False


def automatic_chunk(vocabulary: int, dtype: torch.dtype, device: torch.device, tokens: int) -> int:
    """Tokens whose logits fill the budget of a chunk: 256 MiB on CUDA, 32 MiB elsewhere; at least one token.

    The backward holds two tensors of this size at once, three with a soft-cap. A sixteenth of the tokens is enough, so
    that chunks get smaller where a context-parallel group shares the tokens out.

    Args:
        vocabulary: rows of the head weight on this rank.
        dtype: of the operands.
        device: where they are.
        tokens: all tokens of the call.
    """
    budget = _CHUNK_BYTES.get(device.type, _CHUNK_BYTES_ELSEWHERE)
    enough = max(_LEAST_TOKENS, -(-tokens // 16))
    return max(1, min(enough, budget // (vocabulary * wide_dtype(dtype).itemsize)))


def fused_statistics(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, head: Head) -> Statistics:
    """Statistics of tokens, with at most ``chunk_tokens x V`` logits at a time in forward and backward.

    Args:
        hidden: ``[T, H]``.
        weight: ``[V, H]``.
        bias: ``[V]`` or None.
        labels: int64 ``[T]``, rows of ``weight``; negative where a token has no target.
        head: how to compute.

    Returns:
        Statistics, differentiable once by hidden, weight and bias. Gradients are summed in float32 or better and
        returned in the dtype of each input.
    """
    return Statistics(*_FusedStatistics.apply(hidden, weight, bias, labels, head))


class _FusedStatistics(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, head: Head
    ) -> tuple[Tensor | None, ...]:
        with torch.autocast(hidden.device.type, enabled=False):
            operands = _Operands(hidden, weight, bias, head)
            parts = [_chunk_statistics(operands.logits(rows), labels[rows], head) for rows in operands.chunks()]
        log_prob, lse, entropy, mean = (_joined(column) for column in zip(*parts, strict=True))
        ctx.head = head
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, bias, labels, lse, entropy)
        return log_prob, lse, entropy, mean

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_create_graph()
        hidden, weight, bias, labels, lse, entropy = ctx.saved_tensors
        with torch.autocast(hidden.device.type, enabled=False):
            operands = _Operands(hidden, weight, bias, ctx.head)
            sums = _GradientSums(operands, ctx.needs_input_grad)
            for rows in operands.chunks():
                own = Statistics(*(None if g is None else g[rows] for g in grads))  # type: ignore[arg-type]
                of_rows = None if entropy is None else entropy[rows]
                slope = _logit_gradient(operands.logits(rows), labels[rows], lse[rows], of_rows, own, ctx.head)
                sums.add(rows, slope)
            return *sums.result(), None, None


class _Operands:
    """The inputs as the products take them, and their logits by chunks of tokens."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, head: Head) -> None:
        self.head, self.hidden, self.given = head, hidden, (hidden, weight, bias)
        self.dtype, self.wide = operand_dtype(head.dtype, hidden.device), wide_dtype(head.dtype)
        self.weight = self._rounded(weight)
        self.bias = None if bias is None else self._rounded(bias).to(self.wide)

    def _rounded(self, x: Tensor) -> Tensor:
        """First to the dtype that autocast would give, then to that of the products."""
        return x.to(self.head.dtype).to(self.dtype)

    def chunks(self) -> Iterator[slice]:
        """Stretches of tokens; one empty stretch if there is no token."""
        size = self.head.chunk_tokens
        return (slice(start, start + size) for start in range(0, max(len(self.hidden), 1), size))

    def rows(self, rows: slice) -> Tensor:
        """Hidden states of a chunk."""
        return self._rounded(self.hidden[rows])

    def logits(self, rows: slice) -> Tensor:
        """Logits of a chunk, ``[n, V]`` in float32 or better."""
        outputs = wide_matmul(self.rows(rows), self.weight.T)
        if self.bias is not None:
            outputs.add_(self.bias)
        return self.head.transform.apply_(outputs)


class _GradientSums:
    """Gradients of hidden states, weight and bias, over all chunks."""

    def __init__(self, operands: _Operands, needed: tuple[bool, ...]) -> None:
        self._operands = operands
        self.hidden, self.weight, self.bias = (
            torch.zeros(given.shape, dtype=operands.wide, device=given.device) if given is not None and need else None
            for given, need in zip(operands.given, needed, strict=False)
        )

    def add(self, rows: slice, gradient: Tensor) -> None:
        """Take in one chunk: the gradient of the head's outputs ``[n, V]``."""
        if self.bias is not None:
            self.bias.add_(gradient.sum(0))
        gradient = gradient.to(self._operands.dtype)
        if self.hidden is not None:
            self.hidden[rows] = wide_matmul(gradient, self._operands.weight)
        if self.weight is not None:
            if gradient.dtype == self.weight.dtype:
                self.weight.addmm_(gradient.T, self._operands.rows(rows))
            else:
                self.weight.add_(wide_matmul(gradient.T, self._operands.rows(rows)))

    def result(self) -> tuple[Tensor | None, ...]:
        """All three, each in its input's dtype."""
        sums = (self.hidden, self.weight, self.bias)
        return tuple(
            None if total is None or given is None else total.to(given.dtype)
            for total, given in zip(sums, self._operands.given, strict=True)
        )


def _joined(parts: tuple[Tensor | None, ...]) -> Tensor | None:
    given = [part for part in parts if part is not None]
    return torch.cat(given) if given else None


def _chunk_statistics(logits: Tensor, labels: Tensor, head: Head) -> Statistics:
    """Statistics of a chunk; the logits are overwritten."""
    lowest = torch.finfo(logits.dtype).min  # a share of the vocabulary that is masked as a whole has no NaN
    top = logits.amax(1).clamp_(min=lowest)
    shifted = logits.sub_(top[:, None])
    picked = shifted.gather(1, labels.clamp(min=0)[:, None])[:, 0]
    mean = shifted.mean(1) if head.mean else None
    if head.entropy:
        weights = shifted.exp()
        total = weights.sum(1).clamp_(min=torch.finfo(logits.dtype).tiny)
        spread = weights.mul_(shifted.clamp_(min=LEAST_LOG_PROB)).sum(1)
        entropy = total.log() - spread / total
    else:
        total, entropy = shifted.exp_().sum(1).clamp_(min=torch.finfo(logits.dtype).tiny), None
    log_total = total.log()
    log_prob = torch.where(labels >= 0, picked - log_total, 0)
    return Statistics(log_prob, top + log_total, entropy, None if mean is None else mean - log_total)


def _logit_gradient(
    logits: Tensor, labels: Tensor, lse: Tensor, entropy: Tensor | None, grads: Statistics, head: Head
) -> Tensor:
    """The gradient of the head's outputs of a chunk; the logits are overwritten.

    With p the probabilities, H the entropy and g the gradients of log_prob, logsumexp (L), entropy and mean (m), that of
    logit j is ``p_j (g_L - g_log_prob - g_m - g_H (log p_j + H)) + g_log_prob [j = target] + g_m / V``.
    """
    zero = torch.zeros_like(lse)
    of_target = zero if grads.log_prob is None else torch.where(labels >= 0, grads.log_prob, 0)
    of_mean = zero if grads.mean_log_prob is None else grads.mean_log_prob
    common = (zero if grads.logsumexp is None else grads.logsumexp) - of_target - of_mean
    slopes = head.transform.slopes(logits)
    log_probs = logits.sub_(lse[:, None])
    gradient = log_probs.exp()
    if grads.entropy is not None and entropy is not None:
        factors = log_probs.clamp_(min=LEAST_LOG_PROB).add_(entropy[:, None]).mul_(-grads.entropy[:, None])
        gradient.mul_(factors.add_(common[:, None]))
    else:
        gradient.mul_(common[:, None])
    if grads.mean_log_prob is not None:
        gradient.add_((of_mean / logits.shape[1])[:, None])
    tokens = torch.arange(len(labels), device=labels.device)
    gradient[tokens, labels.clamp(min=0)] += of_target  # one place a row: the same sum on every run
    return gradient.mul_(slopes)
