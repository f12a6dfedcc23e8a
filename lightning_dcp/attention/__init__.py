"""Attention over a CP group: exact, forward and backward, for packed samples."""

from lightning_dcp.attention.engine import AttentionKind, context_parallel_attention
from lightning_dcp.attention.functional import attention
from lightning_dcp.attention.options import AttentionOptions

__all__ = ["AttentionKind", "AttentionOptions", "attention", "context_parallel_attention"]
