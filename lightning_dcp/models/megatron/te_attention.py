"""Transformer Engine's attention in a layer spec, over the CP group of the pack that a call is about."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import Tensor

from lightning_dcp.attention.options import AttentionOptions
from lightning_dcp.attention.transformer_engine import packed_seq_params, te_context_parallel
from lightning_dcp.models.megatron.scope import Scope
from lightning_dcp.parallel.context import CPContext


def scheme_in_force(options: AttentionOptions) -> str:
    """How keys reach other ranks with Transformer Engine's attention, which no scheme is chosen for: ``auto`` is ``ring``."""
    return options.scheme if isinstance(options.scheme, str) else "ring"


@cache
def te_core_attention() -> type:
    """The class, made on first use: its base is there only where Transformer Engine is."""
    from megatron.core.extensions.transformer_engine import TEDotProductAttention

    class ContextParallelTEAttention(TEDotProductAttention):
        """``TEDotProductAttention`` whose group is set for each call, and whose layers need to know nothing of packs.

        Its queries are ``[T, 1, H, D]``, as without packing: positions are rotated token by token before, so that no other
        layer looks at a static group.

        Samples come with padding to equal chunks (:mod:`lightning_dcp.models.megatron.alignment`).

        Attributes:
            scope: tells the pack that a call is about.
            needs_equal_chunks: samples must be multiples of 2c tokens on c ranks.
        """

        scope: Scope | None = None
        needs_equal_chunks = True

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
            context = scope.context.with_padding
            q, k, v = (context.without_fill(tensor.squeeze(1)) for tensor in (query, key, value))
            with te_context_parallel(self, context, scheme_in_force(scope.attention)):
                packed = packed_of(scope.context, causal="causal" in attn_mask_type.name)
                out = super().forward(q, k, v, None, attn_mask_type, attention_bias, packed, **options)
            return context.with_fill(out.reshape(len(q), -1)).unsqueeze(1)

    return ContextParallelTEAttention


def packed_of(context: CPContext, *, causal: bool) -> Any:
    """The boundaries of a pack with the padding of its samples, as ``PackedSeqParams``.

    To causal attention padding counts as tokens: none before it sees it, no gradient comes to it, more kernels take packs
    without gaps, and none leaves rows of its output unset. To other attention it is told.

    Args:
        context: the pack, as its layers see it.
        causal: whether a token sees none after it.
    """
    return packed_seq_params(context.with_padding, None if causal else context.layout.lengths)
