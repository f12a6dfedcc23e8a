"""Planning: which group of ranks takes which samples, in which order. No tensor is seen here."""

from lightning_dcp.schedule.alignment import Alignment
from lightning_dcp.schedule.bound import lower_bound_s
from lightning_dcp.schedule.cost import CostModel
from lightning_dcp.schedule.cost_file import load_cost_model, save_cost_model
from lightning_dcp.schedule.dynamic import DynamicScheduler
from lightning_dcp.schedule.hardware import HARDWARE, from_transformer_config, preset
from lightning_dcp.schedule.megatron import MegatronScheduler
from lightning_dcp.schedule.plan import MicroBatch, Pack, Scheduler, StepPlan
from lightning_dcp.schedule.simulate import PackRun, Simulation, simulate
from lightning_dcp.schedule.static import StaticScheduler
from lightning_dcp.schedule.summary import PlanSummary, summarize

__all__ = [
    "HARDWARE",
    "Alignment",
    "CostModel",
    "DynamicScheduler",
    "MegatronScheduler",
    "MicroBatch",
    "Pack",
    "PackRun",
    "PlanSummary",
    "Scheduler",
    "Simulation",
    "StaticScheduler",
    "StepPlan",
    "from_transformer_config",
    "load_cost_model",
    "lower_bound_s",
    "preset",
    "save_cost_model",
    "simulate",
    "summarize",
]
