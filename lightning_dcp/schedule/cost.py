"""What a sample costs: a linear part, a quadratic one (attention), and what it takes to cut it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_dcp.errors import Problem, raise_problems


@dataclass(frozen=True)
class CostModel:
    """Time of one sample of L tokens on c ranks, forward and backward.

    ``(linear * L + attention * L^2) / c + hop * (c - 1)``. Only ratios matter to the scheduler, so with ``linear = 1``
    everything is counted in tokens.

    In a decoder of hidden size h, one layer spends about 24 h^2 FLOP a token on matrix products and 2 h L on causal
    attention (2 products of 2 h L / 2), so both are equal at L = 12 h; the default, 36,000 tokens, is what FlexSP
    (ASPLOS'25) measured for a 7B model.

    Attributes:
        linear: seconds a token.
        attention: seconds a token^2.
        hop: seconds that one more rank in the ring costs each of them: transfers that compute does not hide, waiting,
            and shorter blocks. The default is the time of 256 tokens.
    """

    linear: float = 1.0
    attention: float = 1.0 / 36_000
    hop: float = 256.0

    def __post_init__(self) -> None:
        wrong = {name: value for name, value in vars(self).items() if not (math.isfinite(value) and value >= 0)}
        problems = [
            Problem(f"{name}={value}", "not a finite number of 0 or more", "give seconds")
            for name, value in wrong.items()
        ]
        if not wrong and self.linear + self.attention == 0:
            problems = [
                Problem("linear=0, attention=0", "a model by which work costs nothing", "give at least one of them")
            ]
        raise_problems(problems)

    def sample(self, length: int, cp_size: int = 1) -> float:
        """Time of one sample on each rank of a group."""
        return (self.linear * length + self.attention * length * length) / cp_size + self.hop * (cp_size - 1)
