"""Dynamic context parallelism for PyTorch Lightning: every packed micro-batch gets its own context-parallel size.

Importing this package registers the strategies ``"dcp"`` and ``"dcp_notebook"``; it touches neither CUDA nor process
groups.
"""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_dcp.batch import PackedBatch
from lightning_dcp.batch.labels import shifted_labels
from lightning_dcp.boundaries.budget import BoundaryBudget
from lightning_dcp.boundaries.greedy import build_context_shards
from lightning_dcp.callbacks import (
    GradientNorm,
    PerformanceMonitor,
    RouterReplay,
    RunSummary,
    SchedulerCallback,
    StabilityMonitor,
)
from lightning_dcp.errors import ConfigurationError, DCPError
from lightning_dcp.loss import next_token_loss
from lightning_dcp.megatron_gpt import MegatronGPT
from lightning_dcp.models import Decoder
from lightning_dcp.models.megatron import MegatronModel
from lightning_dcp.schedule import CostModel, DynamicScheduler, MegatronScheduler, StaticScheduler, StepPlan
from lightning_dcp.segments import Segment
from lightning_dcp.stability.settings import AlarmSettings
from lightning_dcp.strategy import DCPStrategy

__all__ = [
    "AlarmSettings",
    "BoundaryBudget",
    "ConfigurationError",
    "CostModel",
    "DCPError",
    "DCPStrategy",
    "Decoder",
    "DynamicScheduler",
    "GradientNorm",
    "MegatronGPT",
    "MegatronModel",
    "MegatronScheduler",
    "PackedBatch",
    "PerformanceMonitor",
    "RouterReplay",
    "RunSummary",
    "SchedulerCallback",
    "Segment",
    "StabilityMonitor",
    "StaticScheduler",
    "StepPlan",
    "build_context_shards",
    "next_token_loss",
    "shifted_labels",
]
__version__ = "0.1.0"

if "dcp" not in StrategyRegistry:
    StrategyRegistry.register("dcp", DCPStrategy, description="dynamic context parallelism")
    StrategyRegistry.register(
        "dcp_notebook", DCPStrategy, description="dynamic context parallelism in notebooks", start_method="fork"
    )
