"""Losses, and the one place where a loss is weighted."""

from lightning_dcp.loss.linear_cross_entropy import (
    TokenLogProbs,
    linear_cross_entropy,
    linear_log_probs,
)
from lightning_dcp.loss.next_token import next_token_loss
from lightning_dcp.loss.per_sample import (
    expand_samples,
    family,
    last_tokens,
    sample_means,
    sample_sums,
    token_log_probs,
    token_mean,
)
from lightning_dcp.loss.weighting import LossNormalization

__all__ = [
    "LossNormalization",
    "TokenLogProbs",
    "expand_samples",
    "family",
    "last_tokens",
    "linear_cross_entropy",
    "linear_log_probs",
    "next_token_loss",
    "sample_means",
    "sample_sums",
    "token_log_probs",
    "token_mean",
]
