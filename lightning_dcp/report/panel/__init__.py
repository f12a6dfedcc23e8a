"""The stability panel: one HTML file that says why a run's steps were steady, or why not."""

from lightning_dcp.report.panel.panel import Panel, panel_of
from lightning_dcp.report.panel.render import render, write_panel

__all__ = ["Panel", "panel_of", "render", "write_panel"]
