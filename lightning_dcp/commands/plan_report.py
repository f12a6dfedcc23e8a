"""What ``lightning-dcp plan`` tells of a comparison: tables, JSON, pictures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console

from lightning_dcp.commands.comparison import Comparison, PlannedBatch
from lightning_dcp.commands.lengths import LengthBatches
from lightning_dcp.commands.sweep import Sweep
from lightning_dcp.report.plan_table import comparison_table, verdict
from lightning_dcp.report.sweep import draw_sweep, sweep_table
from lightning_dcp.report.timeline import Panel, draw_timeline
from lightning_dcp.schedule.simulate import simulate


class PlanReport:
    """A comparison on the console, as JSON, as pictures.

    Args:
        comparison: what to tell of.
        swept: a sweep over other settings, if one was asked for.
        read: the lengths that were planned.
        cost_model: its name.
        dynamic: what to call the compared scheduler's plans.
    """

    def __init__(
        self, comparison: Comparison, swept: Sweep | None, read: LengthBatches, cost_model: str, dynamic: str
    ) -> None:
        self.comparison, self.swept, self.read, self.cost_model = comparison, swept, read, cost_model
        self.static = f"static CP {comparison.context_parallel_size}"
        self.dynamic = dynamic

    @property
    def _shown(self) -> PlannedBatch:
        return self.comparison.batches[self.comparison.median]

    @property
    def _source(self) -> str:
        return Path(self.read.source).name

    def _for_what(self) -> str:
        setting = self.comparison.setting
        return f"{setting.ranks} ranks, mode {setting.mode}, cost model {Path(self.cost_model).name}"

    def _data(self) -> str:
        read, count = self.read, len(self.read.batches)
        batches = "1 batch" if count == 1 else f"{count} batches"
        longest = f"the longest sample has {read.longest:,}"
        return f"{batches} of {read.samples} samples and {read.tokens:,.0f} tokens from {self._source}; {longest}"

    def _verdict(self, speedup: float) -> str:
        said = verdict(speedup, static=self.static, dynamic=self.dynamic)
        return said[0].upper() + said[1:]

    def print(self) -> None:
        """Tables and sentences."""
        console, comparison = Console(highlight=False), self.comparison
        limit = comparison.setting.max_seqlen_per_dp_cp_rank
        console.print(f"{self._data()}\n{self._for_what()}, at most {limit:,} tokens a rank", markup=False)
        table = comparison_table(comparison.static, comparison.dynamic, names=(self.static, self.dynamic))
        console.print(table)
        if self.swept is not None:
            console.print(sweep_table(self.swept.times(), self.swept.choice))
            console.print(self.swept.advice(), markup=False)
        console.print("The cost model predicts; `lightning-dcp calibrate` measures one for your model and machine.")
        console.print(self._verdict(comparison.speedup), style="bold")

    def write_json(self, path: Path) -> None:
        """The dynamic plan of the shown batch, in the form of ``StepPlan.to_json``; the rest under keys of its own."""
        shown = self._shown
        values: dict[str, Any] = shown.dynamic.to_json()
        values["static"] = shown.static.to_json()
        values["summary"] = self.comparison.to_dict()
        if self.swept is not None:
            values["sweep"] = self.swept.to_dict()
        path.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")

    def draw(self, path: Path) -> None:
        """The timeline of the shown batch, and the sweep beside it."""
        shown, setting = self._shown, self.comparison.setting
        bound = shown.dynamic_summary.lower_bound_s
        panels = [
            Panel(name, plan, simulate(plan, setting.cost), bound)
            for name, plan in ((self.static, shown.static), (self.dynamic, shown.dynamic))
        ]
        limit = f"at most {setting.max_seqlen_per_dp_cp_rank:,} tokens a rank"
        draw_timeline(path, panels, title=f"{self._batch_shown()}\n{self._for_what()}, {limit}")
        if self.swept is not None:
            beside = path.with_name(f"{path.stem}-sweep{path.suffix}")
            draw_sweep(beside, self.swept.times(), self.swept.choice, title=f"{self._data()}\n{self._for_what()}")

    def _batch_shown(self) -> str:
        shown, number, count = self._shown, self.comparison.median, len(self.comparison.batches)
        batch = f"batch {number + 1} of {count} (the median speed-up): " if count > 1 else ""
        samples, tokens = len(shown.static.lengths), sum(shown.static.lengths)
        return f"{self._verdict(shown.speedup)}\n{self._source}, {batch}{samples:,} samples, {tokens:,} tokens"
