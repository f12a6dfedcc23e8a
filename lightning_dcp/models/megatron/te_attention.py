"""Transformer Engine's attention in a layer spec, over the CP group of the pack that a call is about."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import Tensor

from lightning_dcp.attention.transformer_engine import packed_seq_params, te_context_parallel
from lightning_dcp.models.megatron.scope import Scope


@cache
def te_core_attention() -> type:
    """The class, made on first use: its base is there only where Transformer Engine is."""
    from megatron.core.extensions.transformer_engine import TEDotProductAttention

    class ContextParallelTEAttention(TEDotProductAttention):
        """``TEDotProductAttention`` whose group is set for each call, and whose layers need to know nothing of packs.

        Its queries are ``[T, 1, H, D]``, as without packing: positions are rotated token by token before, so that no other
        layer looks at a static group.
        """

        scope: Scope | None = None

        def forward(
            self,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            attention_mask: Tensor | None = None,
            attn_mask_type: Any = None,
            attention_bias: Tensor | None = None,
            packed_seq_params: Any = None,
            **options: Any,
        ) -> Tensor:
            """As ``TEDotProductAttention.forward``; on a pack, over its group."""
            scope = None if self.scope is None else self.scope.current
            if scope is None:
                return super().forward(
                    query, key, value, attention_mask, attn_mask_type, attention_bias, packed_seq_params, **options
                )
            context = scope.context
            q, k, v = (tensor.squeeze(1) for tensor in (query, key, value))
            scheme = scope.attention.scheme if isinstance(scope.attention.scheme, str) else "ring"
            with te_context_parallel(self, context, scheme):
                out = super().forward(q, k, v, None, attn_mask_type, attention_bias, _packed(context), **options)
            return out.reshape(query.shape[0], 1, -1)

    return ContextParallelTEAttention


def _packed(context: Any) -> Any:
    return packed_seq_params(context)
