"""Sharded checkpoints of modules with Megatron-Core models: each rank writes its part, any layout reads them."""

from lightning_dcp.models.megatron.checkpoint.directory import is_sharded
from lightning_dcp.models.megatron.checkpoint.optimizers import hyper_parameters
from lightning_dcp.models.megatron.checkpoint.store import ShardedCheckpoints
from lightning_dcp.models.megatron.checkpoint.weights import outside_state

__all__ = ["ShardedCheckpoints", "hyper_parameters", "is_sharded", "outside_state"]
