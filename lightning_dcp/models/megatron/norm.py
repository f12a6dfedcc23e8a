"""Norms for layer specs without Transformer Engine; Megatron-Core's own refuse sequence parallelism."""

from __future__ import annotations

from typing import Any

from torch import nn

KINDS: dict[str, type[nn.LayerNorm] | type[nn.RMSNorm]] = {"LayerNorm": nn.LayerNorm, "RMSNorm": nn.RMSNorm}
"""By the config's ``normalization``."""


class TorchNorm:
    """torch's LayerNorm or RMSNorm, by the config, with weights marked as Megatron-Core wants them.

    Under sequence parallelism each tensor-parallel rank normalises its own tokens, and the mark makes
    ``finalize_model_grads`` add up the weights' gradients over them.

    Its arguments are those that the tested releases give. What another release gives besides is a TypeError, not ignored.
    """

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5) -> nn.Module:  # type: ignore[misc]
        """The norm of this width.

        Args:
            config: the model's TransformerConfig.
            hidden_size: numbers that are normalised together.
            eps: added to the variance.

        Raises:
            ValueError: a ``normalization`` of another kind. Megatron-Core adds to its words where a layer is made.
        """
        if config.normalization not in KINDS:
            raise ValueError(
                f"normalization={config.normalization!r}, and layers without Transformer Engine have {list(KINDS)}"
            )
        norm = KINDS[config.normalization](hidden_size, eps=eps, dtype=config.params_dtype)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm
