"""How fast and how full the ranks work, as torchmetrics classes; of use with any strategy."""

from lightning_dcp.metrics.flops import PEAK_FLOPS, ModelFlopUtilization
from lightning_dcp.metrics.shares import BusyShare, PaddingShare
from lightning_dcp.metrics.speed import StepTime, TokenThroughput

__all__ = ["PEAK_FLOPS", "BusyShare", "ModelFlopUtilization", "PaddingShare", "StepTime", "TokenThroughput"]
