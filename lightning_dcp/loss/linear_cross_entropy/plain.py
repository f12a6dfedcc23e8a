"""The same statistics by one matrix of logits: for temperatures that differ between tokens, and as a reference."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_dcp.loss.linear_cross_entropy.logits import LEAST_LOG_PROB
from lightning_dcp.loss.linear_cross_entropy.matmul import wide_dtype
from lightning_dcp.loss.linear_cross_entropy.statistics import Head, Statistics


def plain_statistics(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, head: Head, temperature: Tensor | None
) -> Statistics:
    """Statistics of tokens by ``[T, V]`` logits in float32 or better, which autograd keeps for the backward.

    Args:
        hidden: ``[T, H]``.
        weight: ``[V, H]``.
        bias: ``[V]`` or None.
        labels: int64 ``[T]``; negative where a token has no target.
        head: how to compute; its chunks are not used.
        temperature: ``[T]``, instead of the head's; may require a gradient.
    """
    with torch.autocast(hidden.device.type, enabled=False):
        logits = _logits(hidden, weight, bias, head, temperature)
        log_probs = logits.log_softmax(1)
        picked = log_probs.gather(1, labels.clamp(min=0)[:, None])[:, 0]
        return Statistics(
            torch.where(labels >= 0, picked, 0),
            logits.logsumexp(1),
            -(log_probs.exp() * log_probs.clamp(min=LEAST_LOG_PROB)).sum(1) if head.entropy else None,
            log_probs.mean(1) if head.mean else None,
        )


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, head: Head, temperature: Tensor | None) -> Tensor:
    wide, transform = wide_dtype(head.dtype), head.transform
    rounded = (None if x is None else x.to(head.dtype).to(wide) for x in (hidden, weight, bias))
    logits = F.linear(*rounded) * transform.logit_scale  # type: ignore[arg-type]
    if transform.softcap is not None:
        logits = transform.softcap * torch.tanh(logits / transform.softcap)
    return logits / (transform.temperature if temperature is None else temperature.to(wide)[:, None])
