"""Losses, and the one place where a loss is weighted."""

from lightning_dcp.loss.next_token import next_token_loss
from lightning_dcp.loss.weighting import LossNormalization

__all__ = ["LossNormalization", "next_token_loss"]
