"""Norms for layer specs without Transformer Engine; Megatron-Core's own refuse sequence parallelism."""

from __future__ import annotations

from typing import Any

from torch import nn


class TorchNorm:
    """torch's LayerNorm or RMSNorm, by the config, with weights marked as Megatron-Core wants them.

    Under sequence parallelism each tensor-parallel rank normalises its own tokens, and the mark makes
    ``finalize_model_grads`` add up the weights' gradients over them.
    """

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any) -> nn.Module:  # type: ignore[misc]
        """The norm of this width; ``unused`` is what a norm of another backend takes."""
        kind = nn.RMSNorm if config.normalization == "RMSNorm" else nn.LayerNorm
        norm = kind(hidden_size, eps=eps, dtype=config.params_dtype)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm
