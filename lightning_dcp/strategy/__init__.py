"""The Lightning strategy: hooks only; the work is done by the parts that it calls."""

from lightning_dcp.strategy.dcp import DCPStrategy

__all__ = ["DCPStrategy"]
