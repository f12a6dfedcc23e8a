"""How fast, how full and how steadily the ranks work, as torchmetrics classes; of use with any strategy."""

from lightning_dcp.metrics.flops import PEAK_FLOPS, ModelFlopUtilization
from lightning_dcp.metrics.hot_spots import HotSpot, HotSpots
from lightning_dcp.metrics.shares import BusyShare, PaddingShare
from lightning_dcp.metrics.speed import StepTime, TokenThroughput
from lightning_dcp.metrics.steadiness import EffectiveThroughput, StepTimeWindow
from lightning_dcp.metrics.time_split import PeakMemory, TimeSplit

__all__ = [
    "PEAK_FLOPS",
    "BusyShare",
    "EffectiveThroughput",
    "HotSpot",
    "HotSpots",
    "ModelFlopUtilization",
    "PaddingShare",
    "PeakMemory",
    "StepTime",
    "StepTimeWindow",
    "TimeSplit",
    "TokenThroughput",
]
