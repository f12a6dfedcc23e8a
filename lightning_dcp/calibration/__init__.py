"""Measuring a model on this machine, and fitting the cost model to what was measured."""

from lightning_dcp.calibration.fit import Fit, Observation, fit_cost_model
from lightning_dcp.calibration.grid import GridPoint, default_lengths, grid

__all__ = ["Fit", "GridPoint", "Observation", "default_lengths", "fit_cost_model", "grid"]
