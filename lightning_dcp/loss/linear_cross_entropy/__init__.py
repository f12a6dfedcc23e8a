"""Cross-entropy and log-probabilities from hidden states and head weight, without ever holding all logits."""

from lightning_dcp.loss.linear_cross_entropy.functions import (
    TokenLogProbs,
    linear_cross_entropy,
    linear_log_probs,
)
from lightning_dcp.loss.linear_cross_entropy.kernels import loss_kernel_names

__all__ = ["TokenLogProbs", "linear_cross_entropy", "linear_log_probs", "loss_kernel_names"]
