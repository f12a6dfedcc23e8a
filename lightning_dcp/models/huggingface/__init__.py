"""Hugging Face models as regions. Nothing here imports transformers unless a model of it is there."""

from lightning_dcp.models.huggingface.detect import is_transformer, transformer_adapter, transformer_region

__all__ = ["is_transformer", "transformer_adapter", "transformer_region"]
