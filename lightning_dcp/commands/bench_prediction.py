"""``lightning-dcp bench prediction``: predicted against measured step times."""

from __future__ import annotations

import json as json_module
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lightning_dcp.calibration.batches import varied_batches
from lightning_dcp.calibration.build import Run, build_run
from lightning_dcp.calibration.measure import RealData, measure_steps
from lightning_dcp.calibration.prediction import Agreement, predict
from lightning_dcp.errors import Problem, raise_problems
from lightning_dcp.report.figure import folder_problems, picture_problems
from lightning_dcp.schedule.choice import SchedulerChoice, SchedulerName
from lightning_dcp.schedule.cost_file import load_cost_model
from lightning_dcp.schedule.plan import Mode

_REAL_BATCHES = 16


def bench_prediction(
    config: list[str],
    cost_model: str | None = None,
    batches: int = 20,
    repeats: int = 3,
    devices: int | None = None,
    checkpoint: str | None = None,
    scheduler: SchedulerName | None = None,
    context_parallel_size: int | None = None,
    schedule_mode: Mode | None = None,
    min_context_parallel_size: int | None = None,
    max_context_parallel_size: int | None = None,
    seed: int = 0,
    json: str | None = None,
    plot: str | None = None,
) -> Agreement:
    """Run different batches and set the measured step times beside those that the cost model predicts.

    The batches have lengths of the configuration's own data: a quarter of its batch size of samples up to all of it,
    some batches of mostly long ones, some of mostly short ones. A step's time is that of all packs, forward and
    backward, on the rank that takes longest; the sum of gradients and the optimizer are in neither number.

    Args:
        config: YAML file(s) of the training run, as for `lightning-dcp fit --config`.
        cost_model: YAML file that `lightning-dcp calibrate` wrote for this configuration, or a preset's name; by default
            the configuration's own.
        batches: how many different batches.
        repeats: measured steps of each batch; their median counts.
        devices: ranks of a node, in place of the configuration's.
        checkpoint: Lightning checkpoint to take weights (and, where it holds them, the module's arguments) from.
        scheduler: what plans the batches, in place of the configuration's scheduler.
        context_parallel_size: CP size of the static scheduler's packs, in place of the configuration's.
        schedule_mode: of the plans, in place of the configuration's.
        min_context_parallel_size: smallest CP size of a pack, in place of the configuration's.
        max_context_parallel_size: largest CP size of a pack, in place of the configuration's.
        seed: of the draw of batches.
        json: also write all numbers to this JSON file.
        plot: also draw predicted against measured times into this PNG file.

    Returns:
        All pairs, the same on all ranks.

    Raises:
        ConfigurationError: all problems of the arguments and the configuration.
    """
    raise_problems(_argument_problems(batches, repeats, json, plot))
    cost = None if cost_model is None else load_cost_model(cost_model)
    run = build_run(
        config, checkpoint=checkpoint, devices=devices, replaced={} if cost is None else {"cost_model": None}
    )
    wanted = {
        "cost_model": cost,
        "scheduler": scheduler,
        "dynamic_context_parallel": None if scheduler is None else scheduler != "static",
        "context_parallel_size": context_parallel_size,
        "schedule_mode": schedule_mode,
        "min_context_parallel_size": min_context_parallel_size,
        "max_context_parallel_size": max_context_parallel_size,
    }
    given: dict[str, Any] = {name: value for name, value in wanted.items() if value is not None}
    choice = replace(run.strategy.scheduler_choice, **given)
    ranks = run.strategy.topology.plane_size
    problems = choice.argument_problems() or choice.plane_problems(ranks)
    if context_parallel_size is not None and choice.kind != "static":
        found = f"the {choice.kind} scheduler, which chooses the sizes"
        problems.append(Problem(f"context_parallel_size={context_parallel_size}", found, "add scheduler=static"))
    raise_problems(problems)
    choice.build(ranks, run.ranks_per_node)  # so that it is refused here, not on every rank
    result = _measure(run, choice, batches, repeats, seed)
    if run.trainer.is_global_zero:
        _print(result)
        if json:
            Path(json).write_text(json_module.dumps(result.to_dict(), indent=1) + "\n", encoding="utf-8")
        if plot:
            _draw(result, plot)
    return result


def _measure(run: Run, choice: SchedulerChoice, batches: int, repeats: int, seed: int) -> Agreement:
    ranks, nodes = run.strategy.topology.plane_size, run.ranks_per_node
    longest = choice.sizes(ranks, nodes)[-1] * choice.max_seqlen_per_dp_cp_rank
    run.strategy.scheduler_choice = choice

    def choose(data: RealData) -> list[tuple[int, ...]]:
        return varied_batches(data.lengths, data.batch_size, batches, longest=longest, seed=seed)

    title = f"{batches} batches on {ranks} rank(s)"
    times = measure_steps(run, choose, repeats=repeats, real_batches=_REAL_BATCHES, title=title)
    cost = replace(choice.cost_model, ranks_per_node=choice.nodes_in_force(nodes))
    plans = [step.plan for step in times if step.plan is not None]
    return predict(plans, [step.median for step in times], cost, speeds=choice.rank_speeds)


def _argument_problems(batches: int, repeats: int, json: str | None, plot: str | None) -> list[Problem]:
    problems = []
    if batches < 2:
        problems.append(Problem(f"batches={batches}", "too few to correlate", "use 2 or more"))
    if repeats < 1:
        problems.append(Problem(f"repeats={repeats}", "nothing to measure", "use 1 or more"))
    problems += [] if json is None else folder_problems(json, "--json")
    problems += [] if plot is None else picture_problems(plot)
    return problems


def _print(result: Agreement) -> None:
    table = Table(title="Seconds of a step, forward and backward")
    for heading in ("samples", "tokens", "longest", "packs of CP size", "predicted", "measured", "ratio"):
        table.add_column(heading, justify="right")
    for p in result.predictions:
        lengths = p.plan.lengths
        packs = "  ".join(f"{size}: {count}" for size, count in p.packs_by_size.items())
        sizes = (f"{len(lengths)}", f"{sum(lengths):,}", f"{max(lengths):,}", packs)
        table.add_row(*sizes, f"{p.predicted:.4f}", f"{p.measured:.4f}", f"{p.measured / p.predicted:.2f}")
    console = Console()
    console.print(table)
    console.print(
        f"Correlation {result.correlation:.3f}; ratio (measured to predicted): mean {result.mean_ratio:.2f}; "
        f"predictions are off by {result.median_error:.1%} (median).",
        soft_wrap=True,
    )


def _draw(result: Agreement, path: str) -> None:
    """A scatter of both times on equal axes, with the line on which a perfect prediction would lie."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 6.0), layout="constrained")
    axes = figure.subplots()
    top = 1.08 * max(result.predicted.max(), result.measured.max())
    axes.plot([0, top], [0, top], color="0.6", linewidth=1, linestyle="--", label="measured = predicted")
    tokens = [sum(p.plan.lengths) for p in result.predictions]
    dots = axes.scatter(
        result.predicted, result.measured, c=tokens, cmap="viridis", edgecolor="black", linewidth=0.5, zorder=3
    )
    figure.colorbar(dots, label="tokens of the batch", shrink=0.8)
    axes.set(
        xlim=(0, top), ylim=(0, top), aspect="equal", xlabel="predicted step time, s", ylabel="measured step time, s"
    )
    axes.set_title(f"{len(tokens)} batches: correlation {result.correlation:.3f}, mean ratio {result.mean_ratio:.2f}")
    axes.legend(loc="upper left")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=130)
