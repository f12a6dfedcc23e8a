"""From the product of hidden states and head weight to logits, and back for gradients."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

LEAST_LOG_PROB = -1000.0
"""Below it the probability is 0 even in float64; so that the product of both is 0 rather than NaN."""


@dataclass(frozen=True)
class LogitTransform:
    """What is done to the head's outputs ``y``, in this order: scale, cap, divide.

    ``logits = softcap * tanh(logit_scale * y / softcap) / temperature`` (soft-cap: Gemma 2, arXiv:2408.00118).

    Attributes:
        logit_scale: a factor.
        softcap: the bound of the logits before the temperature; None for no bound.
        temperature: what the logits are divided by.
    """

    logit_scale: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0

    def apply_(self, outputs: Tensor) -> Tensor:
        """Turn the head's outputs into logits, in place."""
        if self.softcap is None:
            factor = self.logit_scale / self.temperature
            return outputs if factor == 1 else outputs.mul_(factor)
        return outputs.mul_(self.logit_scale / self.softcap).tanh_().mul_(self.softcap / self.temperature)

    def slopes(self, logits: Tensor) -> Tensor | float:
        """The derivative of the logits by the head's outputs: one number, or a tensor like ``logits``."""
        factor = self.logit_scale / self.temperature
        if self.softcap is None:
            return factor
        capped = logits * (self.temperature / self.softcap)  # the tanh
        return capped.square_().neg_().add_(1).mul_(factor)
