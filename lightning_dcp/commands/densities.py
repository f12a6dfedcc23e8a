"""``lightning-dcp densities``: how costly each kind of segment is, learned from a run's record."""

from __future__ import annotations

from pathlib import Path

import yaml
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lightning_dcp.calibration.densities import DensityFit, fit_densities
from lightning_dcp.errors import raise_problems
from lightning_dcp.report.figure import folder_problems
from lightning_dcp.stability.run_folder import RunFolder


def densities(run_dir: str, *, output: str = "densities.yaml") -> DensityFit:
    """Learn how costly the tokens of each kind of segment are, for ChatDataModule(densities="densities.yaml").

    Fits the ranks' seconds of computing to the tokens of each kind that they held, over all recorded steps. The cheapest
    common kind gets density 1.

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
    values = {kind: float(f"{density:.4g}") for kind, density in fit.densities.items()}
    head = (
        "# Densities of segments by kind, learned by `lightning-dcp densities` "
        f"from {fit.rows} steps of ranks; median residual {fit.median_residual:.1%}.\n"
    )
    Path(output).write_text(head + yaml.safe_dump(values, sort_keys=False, allow_unicode=True), encoding="utf-8")
    _print(fit, output)
    return fit


def _print(fit: DensityFit, output: str) -> None:
    console = Console()
    table = Table(title="Cost of a token by kind of segment")
    for heading in ("kind", "tokens", "microseconds a token", "density"):
        table.add_column(heading, justify="left" if heading == "kind" else "right")
    for cost in fit.kinds:
        shown = "not seen" if cost.density is None else f"{cost.density:.3f}"
        table.add_row(escape(cost.kind), f"{cost.tokens:,}", f"{cost.seconds * 1e6:.3f}", shown)
    console.print(table)
    console.print(
        f"Fitted to {fit.rows} steps of ranks ({fit.left_out} left out as far off); median residual "
        f"{fit.median_residual:.1%}.\nWritten to {output}. To use it: ChatDataModule(densities={output!r}).",
        soft_wrap=True,
        markup=False,
    )
