"""Planning: which group of ranks takes which samples, in which order. Pure Python; no tensor is seen here."""

from lightning_dcp.schedule.cost import CostModel
from lightning_dcp.schedule.dynamic import DynamicScheduler
from lightning_dcp.schedule.plan import MicroBatch, Pack, Scheduler, StepPlan
from lightning_dcp.schedule.static import StaticScheduler

__all__ = ["CostModel", "DynamicScheduler", "MicroBatch", "Pack", "Scheduler", "StaticScheduler", "StepPlan"]
