"""How steady the steps of a run are: logged, recorded and told at the end."""

from lightning_dcp.callbacks.stability.monitor import StabilityMonitor
from lightning_dcp.callbacks.stability.run_facts import run_facts

__all__ = ["StabilityMonitor", "run_facts"]
