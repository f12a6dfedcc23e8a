"""Megatron-Core models as regions. Nothing here imports megatron before a model is made."""

from lightning_dcp.models.megatron.adapter import MegatronAdapter, StageOutput
from lightning_dcp.models.megatron.model import MegatronModel, model_parallel_fields
from lightning_dcp.models.megatron.scalar_head import ScalarHead, put_scalar_head
from lightning_dcp.models.megatron.spec import layer_spec

__all__ = [
    "MegatronAdapter",
    "MegatronModel",
    "ScalarHead",
    "StageOutput",
    "layer_spec",
    "model_parallel_fields",
    "put_scalar_head",
]
