"""What a sample costs: a linear part (projections, feed-forward, head) and a quadratic one (attention)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CostModel:
    """Time of one sample of L tokens on one rank, forward and backward: ``linear * L + attention * L^2``.

    Only ratios matter to the scheduler. In a decoder of hidden size h, one layer spends about 24 h^2 FLOP a token on
    matrix products and 2 h L on causal attention (2 products of 2 h L / 2), so both are equal at L = 12 h; the default,
    36,000 tokens, is what FlexSP (ASPLOS'25) measured for a 7B model.

    Attributes:
        linear: seconds a token.
        attention: seconds a token^2.
    """

    linear: float = 1.0
    attention: float = 1.0 / 36_000

    def sample(self, length: int) -> float:
        """Time of one sample on one rank."""
        return self.linear * length + self.attention * length * length
