"""Attention over a CP group: exact, forward and backward, for packed samples."""

from lightning_dcp.attention.ring import ring_attention

__all__ = ["ring_attention"]
