"""``lightning-dcp calibrate``: the cost model of one's own model on one's own machine."""

from __future__ import annotations

import json as json_module
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lightning_dcp.calibration.build import Run, build_run
from lightning_dcp.calibration.fit import Fit, Observation, fit_cost_model
from lightning_dcp.calibration.grid import PlannedSteps, by_lengths, default_lengths, grid, length_problems
from lightning_dcp.calibration.machine import describe_machine, describe_model
from lightning_dcp.calibration.measure import measure_steps
from lightning_dcp.calibration.probe import AttentionProbe
from lightning_dcp.errors import Problem, raise_problems
from lightning_dcp.report.figure import folder_problems
from lightning_dcp.schedule.choice import DEFAULTS, SchedulerChoice
from lightning_dcp.schedule.cost import CostModel
from lightning_dcp.schedule.cost_file import save_cost_model

_UNUSED = {name: value for name, value in DEFAULTS.items() if name != "layout"} | {
    "scheduler": None,
    "dynamic_context_parallel": True,
    "cost_model": None,
}
"""The strategy's arguments for planning: plans are given here, and the file of the cost model need not be there yet."""


@dataclass(frozen=True)
class Calibration:
    """What was measured and fitted.

    Attributes:
        fit: the cost model and the steps it was fitted to.
        model: the module, in words.
        machine: the machine, in words.
    """

    fit: Fit
    model: str
    machine: str

    def comment(self) -> str:
        """Where the numbers come from, for the head of a file."""
        return (
            f"Cost model of {self.model}\n"
            f"on {self.machine}; {date.today().isoformat()}.\n"
            f"Fitted by `lightning-dcp calibrate` to {len(self.fit.observations)} kinds of steps, forward and backward: "
            f"median residual {self.fit.median_residual:.1%}, R^2 {self.fit.r_squared:.4f}."
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        steps = [
            {"samples": list(o.samples), "cp_size": o.cp_size, "packs": o.packs, "measured_s": o.seconds, "fitted_s": p}
            for o, p in zip(self.fit.observations, self.fit.predicted.tolist(), strict=True)
        ]
        return {
            "cost_model": self.fit.cost.to_dict(),
            "model": self.model,
            "machine": self.machine,
            "r_squared": self.fit.r_squared,
            "median_relative_residual": self.fit.median_residual,
            "steps": steps,
        }


def calibrate(
    config: list[str],
    checkpoint: str | None = None,
    devices: int | None = None,
    lengths: list[int] | None = None,
    repeats: int = 5,
    output: str = "cost.yaml",
    json: str | None = None,
) -> CostModel:
    """Measure a model on this machine and write its cost model, for DCPStrategy(cost_model="cost.yaml").

    Runs training steps, forward and backward, over a grid of lengths and context-parallel sizes, with the
    configuration's own model, data, precision and devices; its callbacks and loggers are left out and no weight is
    saved. All ranks are busy with the same while a step is timed. Measure where training will run, with as many ranks.

    Args:
        config: YAML file(s) of the training run, as for `lightning-dcp fit --config`.
        checkpoint: Lightning checkpoint to take weights (and, where it holds them, the module's arguments) from.
        devices: ranks of a node, in place of the configuration's.
        lengths: tokens of the packs to measure; by default from a 16th of a rank's limit to what the plane holds.
        repeats: measured steps of each kind; their median counts.
        output: the YAML file to write.
        json: also write all measurements to this JSON file.

    Returns:
        The cost model, the same on all ranks.

    Raises:
        ConfigurationError: all problems of the arguments and the configuration.
    """
    run = build_run(config, checkpoint=checkpoint, devices=devices, replaced=_UNUSED)
    topology, limit = run.strategy.topology, run.strategy.max_seqlen_per_dp_cp_rank
    wanted = lengths or default_lengths(topology.plane_size, limit)
    problems = length_problems(wanted, topology.plane_size, limit)
    problems += folder_problems(output, "--output") + ([] if json is None else folder_problems(json, "--json"))
    if repeats < 1:
        problems.append(Problem(f"repeats={repeats}", "nothing to measure", "use 1 or more"))
    raise_problems(problems)
    result = _measure(run, tuple(wanted), repeats)
    if run.trainer.is_global_zero:
        save_cost_model(result.fit.cost, output, comment=result.comment())
        if json:
            Path(json).write_text(json_module.dumps(result.to_dict(), indent=1) + "\n", encoding="utf-8")
        _print(result, output)
    return result.fit.cost


def _measure(run: Run, lengths: tuple[int, ...], repeats: int) -> Calibration:
    strategy = run.strategy
    ranks, limit = strategy.topology.plane_size, strategy.max_seqlen_per_dp_cp_rank
    points = by_lengths(grid(lengths, ranks, limit), ranks, limit, strategy.layout)
    scheduler = PlannedSteps({batch: plan for batch, (_, plan) in points.items()})
    strategy.scheduler_choice = SchedulerChoice(scheduler, True, 1, limit, strategy.cost_model)
    probe = AttentionProbe(limit)
    times = measure_steps(
        run,
        lambda _: list(points),
        repeats=repeats,
        callbacks=[probe],
        title=f"{len(points)} kinds of steps on {ranks} rank(s)",
    )
    observations = [
        Observation(point.samples, point.cp_size, point.packs, step.median)
        for step, (point, _) in zip(times, points.values(), strict=True)
    ]
    fit = fit_cost_model(
        observations,
        efficiency=probe.efficiency,
        hop_bytes=probe.calls.hop_bytes or 1.0,  # attention that was not seen: the bandwidth is then tokens/s
        ranks_per_node=run.ranks_per_node,
    )
    return Calibration(fit, describe_model(run.model), describe_machine(strategy))


def _print(result: Calibration, output: str) -> None:
    console, fit = Console(), result.fit
    console.print(_steps_table(fit))
    console.print(_cost_table(fit.cost))
    worst = max(fit.residuals.tolist(), key=abs)
    console.print(
        f"R^2 {fit.r_squared:.4f}; residuals: median {fit.median_residual:.1%}, largest {worst:+.1%}.\n"
        f"Written to {output}. To plan by it: DCPStrategy(cost_model={output!r}), in YAML `cost_model: {output}`.",
        soft_wrap=True,
    )


def _steps_table(fit: Fit) -> Table:
    table = Table(title="Seconds of a step, forward and backward; all groups of the plane run such packs at once")
    for heading in ("CP size", "samples of a pack", "tokens a rank", "measured", "fitted", "residual"):
        table.add_column(heading, justify="right")
    for o, predicted, residual in zip(fit.observations, fit.predicted, fit.residuals, strict=True):
        count, packs = len(o.samples), f", {o.packs} packs" if o.packs > 1 else ""
        samples = f"{count} x {o.samples[0]}{packs}"
        shard = f"{sum(o.samples) / o.cp_size:.0f}"
        table.add_row(str(o.cp_size), samples, shard, f"{o.seconds:.4f}", f"{predicted:.4f}", f"{residual:+.1%}")
    return table


def _cost_table(cost: CostModel) -> Table:
    table = Table(title="Cost model", show_header=False)
    units = {"linear": "s/token", "attention": "s/token^2", "pack_overhead": "s", "hop_latency": "s"}
    units |= {"hop_bytes": "bytes/token", "bandwidth": "bytes/s"}
    if cost.ranks_per_node is not None:
        units |= {"internode_latency": "s", "internode_bandwidth": "bytes/s"}
    for name, unit in units.items():
        table.add_row(name, f"{getattr(cost, name):.3e} {unit}")
    table.add_row("overlap", f"{cost.overlap:.1f}")
    pairs = ", ".join(f"{tokens}: {share:.2g}" for tokens, share in cost.efficiency)
    table.add_row("efficiency by tokens a rank", pairs)
    return table
