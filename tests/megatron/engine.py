"""A stand-in for Transformer Engine's attention that computes what it would, on CPU ranks."""

from __future__ import annotations

import importlib.machinery
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar
from unittest.mock import patch

import torch
from torch import Tensor, nn

from lightning_dcp.attention import transformer_engine as te
from lightning_dcp.attention.engine import AttentionKind, context_parallel_attention
from lightning_dcp.models.megatron import spec, te_attention
from lightning_dcp.parallel.blocks import AttentionMask
from lightning_dcp.parallel.context import make_context
from lightning_dcp.parallel.groups import CPGroup


class DotProductAttention(nn.Module):
    """``transformer_engine.pytorch.DotProductAttention``: takes samples of 2c equal chunks, and says so."""

    calls: ClassVar[list[tuple[int, list[int]]]] = []
    """Of the process: group size, and padded lengths."""

    def __init__(self, heads: int, head_size: int, groups: int, tp_size: int) -> None:
        super().__init__()
        self.num_attention_heads, self.tp_size, self.softmax_type = heads, tp_size, "vanilla"
        self.hidden_size_per_attention_head_k = self.hidden_size_per_attention_head_v = head_size
        self.num_gqa_groups_per_partition, self.window_size = groups // tp_size, (-1, 0)
        self.set_context_parallel_group(None, None, None, "p2p")

    def set_context_parallel_group(
        self, cp_group: Any, cp_global_ranks: Any, cp_stream: Any, cp_comm_type: str
    ) -> None:
        self.cp_group, self.cp_global_ranks = cp_group, cp_global_ranks
        self.cp_stream, self.cp_comm_type = cp_stream, cp_comm_type

    def forward(self, q: Tensor, k: Tensor, v: Tensor, attention_mask: None, **given: Any) -> Tensor:
        assert (given["qkv_format"], given["attn_mask_type"], attention_mask) == ("thd", "padding_causal", None)
        size = 1 if self.cp_group is None else self.cp_group.size()
        padded = given["cu_seqlens_q_padded"].diff().tolist()
        assert given["max_seqlen_q"] == max(padded)
        assert torch.equal(given["cu_seqlens_q"], given["cu_seqlens_q_padded"])
        assert len(q) * size == sum(padded) and all(n % (2 * size) == 0 for n in padded if size > 1)
        self.calls.append((size, padded))
        group = CPGroup(None, (0,)) if size == 1 else CPGroup(self.cp_group, tuple(self.cp_global_ranks))
        context = make_context(group, 0 if size == 1 else self.cp_group.rank(), padded)
        return context_parallel_attention(q, k, v, context, AttentionKind(AttentionMask(True))).flatten(1)


class TEDotProductAttention(DotProductAttention):
    """Megatron-Core's class of this name, which is there only with Transformer Engine."""

    def __init__(self, config: Any, layer_number: int, attn_mask_type: Any, **given: Any) -> None:
        sizes = config.num_attention_heads, config.kv_channels, config.num_query_groups
        super().__init__(*sizes, given["pg_collection"].tp.size())

    def forward(  # type: ignore[override]
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        attn_mask_type: Any,
        attention_bias: Any = None,
        packed_seq_params: Any = None,
        num_splits: Any = None,
    ) -> Tensor:
        names = ("qkv_format", "max_seqlen_q", "max_seqlen_kv", "cu_seqlens_q", "cu_seqlens_kv")
        given = {name: getattr(packed_seq_params, name) for name in (*names, "cu_seqlens_q_padded")}
        assert packed_seq_params.cp_group is None and attn_mask_type.name == "causal"
        return super().forward(query, key, value, attention_mask, attn_mask_type="padding_causal", **given)


@contextmanager
def transformer_engine() -> Iterator[list[tuple[int, list[int]]]]:
    """Core attention of layers made inside is Transformer Engine's; gives its calls."""
    from megatron.core.extensions import transformer_engine as extension

    package, pytorch = types.ModuleType("transformer_engine"), types.ModuleType("transformer_engine.pytorch")
    package.__spec__ = importlib.machinery.ModuleSpec("transformer_engine", None)
    pytorch.DotProductAttention = DotProductAttention  # type: ignore[attr-defined]
    te_attention.te_core_attention.cache_clear()
    DotProductAttention.calls.clear()
    with (
        patch.dict(sys.modules, {"transformer_engine": package, "transformer_engine.pytorch": pytorch}),
        patch.multiple(te, _DEVICE="cpu", _version=lambda: (2, 15), _cp_stream=lambda device: "a stream"),
        patch.object(extension, "TEDotProductAttention", TEDotProductAttention),
        patch.object(spec, "ContextParallelCoreAttention", te_attention.te_core_attention()),  # made of the one before
    ):
        yield DotProductAttention.calls
    te_attention.te_core_attention.cache_clear()
