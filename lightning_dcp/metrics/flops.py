"""Model FLOP utilisation: how much of the machine's peak the model's own arithmetic uses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_dcp.errors import ConfigurationError, Problem, raise_problems
from lightning_dcp.metrics.speed import non_negative

PEAK_FLOPS: dict[str, float] = {
    "a100": 3.12e14,  # NVIDIA A100 data sheet: BF16 tensor core
    "h100": 9.89e14,  # NVIDIA H100 SXM data sheet: BF16 tensor core without sparsity (half of what it prints)
    "h200": 9.89e14,  # NVIDIA H200 SXM data sheet: the H100's processor
}
"""Peak FLOP/s of one device, dense bf16. The speeds in ``schedule/hardware.py`` are what is achieved, not peaks."""


class ModelFlopUtilization(Metric):
    """Model FLOP utilisation (MFU) of training, after PaLM (Chowdhery et al. 2022, arXiv 2204.02311, appendix B).

    A token of a sample of T tokens takes ``6 N + 12 L H Q T`` FLOP, forward and backward: N parameters, L layers, H heads
    of size Q. So a sample takes ``6 N T + 12 L H Q T^2``, and MFU is the sum over all samples, over the time and the
    peak of all ranks. Recomputed activations, padding and the optimizer do not count as work.

    PaLM counts attention in full. With ``causal=True`` its part is halved, as a token sees half of the others on average
    and kernels skip the rest: use it where most of the arithmetic is attention, as PaLM's count can then come out above
    what the ranks did (even above 1).

    Args:
        parameters: N, those that each token goes through: active experts only, and no adapter's frozen copy.
        layers: L.
        heads: H, query heads.
        head_size: Q.
        peak_flops: peak FLOP/s of one rank, or a name in :data:`PEAK_FLOPS` (dense bf16).
        causal: halve the attention part.
        kwargs: as for every torchmetrics class.

    Returns:
        float64 scalar; 0 before the first update.

    Raises:
        ConfigurationError: sizes or a peak that are not positive, an unknown name.
    """

    full_state_update = False
    higher_is_better = True
    flops: Tensor
    seconds: Tensor
    ranks: Tensor

    def __init__(
        self,
        *,
        parameters: int,
        layers: int,
        heads: int,
        head_size: int,
        peak_flops: float | str,
        causal: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        sizes = {"parameters": parameters, "layers": layers, "heads": heads, "head_size": head_size}
        self.peak_flops = _peak(peak_flops)
        remedy = "give the model's size, and a peak in FLOP/s"
        wrong = {n: v for n, v in {**sizes, "peak_flops": self.peak_flops}.items() if not v > 0}
        raise_problems([Problem(f"{name}={value}", "not a positive number", remedy) for name, value in wrong.items()])
        self.linear = 6 * parameters
        self.attention = (6 if causal else 12) * layers * heads * head_size
        self.add_state("flops", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("seconds", torch.zeros((), dtype=torch.float64), dist_reduce_fx="max")
        self.add_state("ranks", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, lengths: Sequence[int], seconds: float) -> None:
        """Count a step. Every rank calls it, also one that is responsible for no sample.

        Args:
            lengths: tokens of the samples that this rank is responsible for: each sample of the batch on one rank.
            seconds: how long the step took.

        Raises:
            ConfigurationError: a negative value.
        """
        non_negative(seconds=seconds, shortest=min(lengths, default=0))
        self.flops = self.flops + sum(self.linear * n + self.attention * n * n for n in lengths)
        self.seconds = self.seconds + seconds
        self.ranks = torch.ones_like(self.ranks)

    def compute(self) -> Tensor:
        """The utilisation since the last reset."""
        possible = self.seconds * self.ranks * self.peak_flops
        return torch.where(possible > 0, self.flops / possible, 0.0)


def _peak(peak_flops: float | str) -> float:
    if not isinstance(peak_flops, str):
        return peak_flops
    if peak_flops not in PEAK_FLOPS:
        remedy = f"use one of {', '.join(PEAK_FLOPS)}, or give FLOP/s as a number"
        raise ConfigurationError([Problem(f"peak_flops={peak_flops!r}", "an unknown name", remedy)])
    return PEAK_FLOPS[peak_flops]
