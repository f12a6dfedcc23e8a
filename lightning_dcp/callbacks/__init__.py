"""Lightning callbacks: the scheduler, and what watches a run."""

from lightning_dcp.callbacks.gradient_norm import GradientNorm
from lightning_dcp.callbacks.performance import PerformanceMonitor
from lightning_dcp.callbacks.router_replay import RouterReplay
from lightning_dcp.callbacks.scheduler import SchedulerCallback
from lightning_dcp.callbacks.stability import StabilityMonitor
from lightning_dcp.callbacks.summary import RunSummary

__all__ = ["GradientNorm", "PerformanceMonitor", "RouterReplay", "RunSummary", "SchedulerCallback", "StabilityMonitor"]
