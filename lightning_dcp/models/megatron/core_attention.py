"""The core attention of Megatron-Core's layers: ours, over the CP group of the pack that a call is about."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_dcp.attention.functional import attention, serve_attention
from lightning_dcp.models.megatron.scope import Scope


class ContextParallelCoreAttention(nn.Module):
    """Takes the place of ``DotProductAttention`` in a layer spec, with its arguments, parameters and shapes.

    Sliding windows (``window_size``, ``window_attn_skip_freq``) and sinks (``softmax_type``) are those of the config.

    Its arguments are those that the tested releases give. What another release gives besides is a TypeError, not ignored.

    Args:
        config: the model's TransformerConfig.
        layer_number: of the layer, from 1.
        attn_mask_type: ``causal`` or ``no_mask``; a call may give another.
        attention_type: ``self``.
        attention_dropout: must be 0, as the config's: a score's dropout would depend on which rank computes it.
        softmax_scale: factor of the scores; 1/sqrt(head size) by default.
        cp_comm_type: not used; how keys reach other ranks belongs to the pack (``DCPStrategy(attention=...)``).
        pg_collection: the process groups; the tensor-parallel one says how many heads this rank has.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str = "self",
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__()
        self.config, self.layer_number, self.attn_mask_type = config, layer_number, attn_mask_type
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.softmax_scale = softmax_scale
        self.window_size = _window(config, layer_number)
        self.scope: Scope | None = None
        heads = config.num_attention_heads // (1 if pg_collection is None else pg_collection.tp.size())
        kind = getattr(config, "softmax_type", "vanilla")
        if kind == "learnable":
            self.softmax_offset = nn.Parameter(torch.zeros(heads, dtype=config.params_dtype))
            self.softmax_offset.tensor_model_parallel = True  # type: ignore[attr-defined]
            self.softmax_offset.partition_dim, self.softmax_offset.partition_stride = 0, 1  # type: ignore[attr-defined]
        elif kind == "off-by-one":
            self.register_buffer("softmax_offset", torch.zeros(heads, dtype=config.params_dtype), persistent=False)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """Queries ``[T, B, H, D]``, keys and values with their heads, to ``[T, B, H * D_v]``.

        Inside a call on a pack B is 1 and T are this rank's tokens; outside each of the B rows is a sequence. No mask is
        taken: sample borders come from the pack.
        """
        q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        kind = self.attn_mask_type if attn_mask_type is None else attn_mask_type
        options = {
            "is_causal": "causal" in kind.name,
            "window_size": self.window_size,
            "scale": self.softmax_scale,
            "softcap": None,
            "sinks": getattr(self, "softmax_offset", None),
            "dropout_p": self.dropout if self.training else 0.0,
        }
        scope = None if self.scope is None else self.scope.current
        out = (
            attention(q, k, v, **options)
            if scope is None
            else serve_attention(scope.context, scope.attention, q, k, v, **options)
        )
        return out.permute(2, 0, 1, 3).flatten(2)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> dict[str, Any]:
        """The sinks, split over tensor-parallel ranks, for ``dist_checkpointing``."""
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

        own = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(own, prefix, dict.fromkeys(own, 0), sharded_offsets)


def _window(config: Any, layer_number: int) -> tuple[int, int] | None:
    """The layer's sliding window, ``(left, right)``."""
    return tuple(config.window_size) if windowed_layers(config)[layer_number - 1] else None


def windowed_layers(config: Any) -> list[bool]:
    """Which layers, in order, have the config's ``window_size``.

    Megatron-Core's rule (``is_layer_window_attention``): all of them; with a number as ``window_attn_skip_freq`` all but every
    so many; with a list of it those that it says.
    """
    skip = getattr(config, "window_attn_skip_freq", None)
    if not getattr(config, "window_size", None):
        return [False] * config.num_layers
    if isinstance(skip, int):
        return [number % skip != 0 for number in range(1, config.num_layers + 1)]
    return [True] * config.num_layers if skip is None else [bool(s) for s in skip]
