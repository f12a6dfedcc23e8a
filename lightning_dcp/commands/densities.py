"""``lightning-dcp densities``: how costly each kind of segment is, learned from a run's record."""

from __future__ import annotations

import math
from pathlib import Path

import yaml
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lightning_dcp.boundaries.budget import BoundaryBudget
from lightning_dcp.calibration.densities import DensityFit, KindCost, fit_densities
from lightning_dcp.errors import raise_problems
from lightning_dcp.report.figure import folder_problems
from lightning_dcp.stability.run_folder import RunFolder

DENSE_FROM = BoundaryBudget.dense_from
"""Density from which the planner's budget calls a token dense, unless told otherwise."""


def densities(run_dir: str, *, output: str = "densities.yaml") -> DensityFit:
    """Learn how costly the tokens of each kind of segment are, for ChatDataModule(densities="densities.yaml").

    Fits the ranks' seconds of computing to the tokens of each kind that they held, over all recorded steps. Density 1 is the
    cost of text (or of user) where that is common, else the median cost of a token. Kinds whose cost could not be told are
    written as 1.0, with a comment.

    Args:
        run_dir: the folder that a run with a StabilityMonitor logged to.
        output: the YAML file to write, with lines `kind: density`.

    Returns:
        The fit.

    Raises:
        ConfigurationError: an output that cannot be written.
        DataError: no record there, or one that densities cannot be learned from.
    """
    raise_problems(folder_problems(output, "--output"))
    run = RunFolder.read(run_dir)
    warm_up = int(run.meta.get("warmup_batches", 0))
    fit = fit_densities(run.steps[warm_up:])
    Path(output).write_text(_file(fit), encoding="utf-8")
    _print(fit, output)
    return fit


def _rounded(density: float) -> float:
    return float(f"{density:.4g}")


def _file(fit: DensityFit) -> str:
    """A line a kind; a comment above those that could not be told."""
    head = (
        "# Densities of segments by kind, learned by `lightning-dcp densities` "
        f"from {fit.rows} steps of ranks; median residual {fit.median_residual:.1%}; 1.0 is {fit.base}.\n"
    )
    lines = [head, *(f"# Warning: {warning}.\n" for warning in fit.warnings)]
    for kind, density in fit.densities.items():
        lines += ["# could not be told, so 1.0:\n"] if kind in fit.not_told else []
        lines.append(yaml.safe_dump({kind: _rounded(density)}, allow_unicode=True))
    return "".join(lines)


def _print(fit: DensityFit, output: str) -> None:
    console = Console()
    table = Table(title="Cost of a token by kind of segment")
    for heading in ("kind", "tokens", "microseconds a token", "density"):
        table.add_column(heading, justify="left" if heading == "kind" else "right")
    for cost in fit.kinds:
        shown = "could not be told" if cost.density is None else f"{cost.density:.3f}"
        table.add_row(escape(cost.kind), f"{cost.tokens:,}", _cost_words(cost), shown)
    console.print(table)
    dense = [kind for kind, density in fit.densities.items() if _rounded(density) >= DENSE_FROM]
    said = [
        f"Density 1 is {fit.base}. Dense ({DENSE_FROM:g} or more): {', '.join(dense) or 'none'}.",
        f"Could not be told, written as 1.0: {', '.join(fit.not_told)}." if fit.not_told else "",
        *(f"Warning: {warning}." for warning in fit.warnings),
        f"Fitted to {fit.rows} steps of ranks ({fit.left_out} left out as far off); median residual "
        f"{fit.median_residual:.1%}.",
        f"Written to {output}. To use it: ChatDataModule(densities={output!r}).",
    ]
    console.print("\n".join(filter(None, said)), soft_wrap=True, markup=False)


def _cost_words(cost: KindCost) -> str:
    spread = f" ± {cost.spread * 1e6:.3f}" if math.isfinite(cost.spread) else ""
    return f"{cost.seconds * 1e6:.3f}{spread}"
