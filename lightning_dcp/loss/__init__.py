"""Losses, and the one place where a loss is weighted."""

from lightning_dcp.loss.linear_cross_entropy import (
    LossAndEntropy,
    TokenLogProbs,
    linear_cross_entropy,
    linear_log_probs,
)
from lightning_dcp.loss.next_token import next_token_loss
from lightning_dcp.loss.weighting import LossNormalization

__all__ = [
    "LossAndEntropy",
    "LossNormalization",
    "TokenLogProbs",
    "linear_cross_entropy",
    "linear_log_probs",
    "next_token_loss",
]
