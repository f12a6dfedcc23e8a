"""The table of ``lightning-dcp plan``: static against dynamic, and what follows from it."""

from __future__ import annotations

from rich.table import Table

from lightning_dcp.schedule.summary import PlanSummary

WORTH_IT = 1.05
"""Speed-ups below this are within what a cost model may be wrong by."""


def comparison_table(static: PlanSummary, dynamic: PlanSummary, *, names: tuple[str, str]) -> Table:
    """Both summaries side by side, and how they relate where that means something.

    Args:
        static: of the static plans.
        dynamic: of the others.
        names: the columns' headings.
    """
    table = Table()
    table.add_column("a step, mean over batches")
    for name in names:
        table.add_column(name, justify="right")
    table.add_column("ratio", justify="right")
    ratios = {"predicted step time": static.predicted_step_s / dynamic.predicted_step_s}
    for (label, left), right in zip(_rows(static).items(), _rows(dynamic).values(), strict=True):
        table.add_row(label, left, right, f"{ratios[label]:.2f}x" if label in ratios else "")
    return table


def _rows(summary: PlanSummary) -> dict[str, str]:
    packs = (f"CP {size}: {_count(count)}" for size, count in summary.packs_by_cp_size.items())
    return {
        "predicted step time": seconds(summary.predicted_step_s),
        "share of lower bound": f"{summary.share_of_lower_bound:.1%}",
        "busy share of the ranks": f"{summary.busy_share:.1%}",
        "padding for 2 x CP backends": f"{summary.padding_share:.2%}",
        "fill of the packs": f"{summary.fill:.1%}",
        "packs": "\n".join(packs),
        "micro-batches": _count(summary.microbatches),
        "tokens of a rank, fewest": f"{summary.tokens_per_rank_min:,.0f}",
        "tokens of a rank, most": f"{summary.tokens_per_rank_max:,.0f}",
        "planning time": seconds(summary.planning_s),
    }


def _count(number: float) -> str:
    return f"{number:,.0f}" if number == int(number) else f"{number:,.1f}"


def seconds(value: float) -> str:
    """A time in words: ``1.23 s``, ``45.6 ms``."""
    if value >= 0.9995:
        return f"{value:,.2f} s"
    return f"{value * 1e3:.0f} ms" if value >= 0.0995 else f"{value * 1e3:.{3 if value >= 1e-3 else 2}g} ms"


def verdict(speedup: float, *, static: str, dynamic: str) -> str:
    """One plain sentence.

    Args:
        speedup: static step time over dynamic step time.
        static: name of the static way, such as ``static CP 4``.
        dynamic: name of the other.
    """
    if speedup >= WORTH_IT:
        return f"{dynamic} would make this step {speedup:.2f}x faster than {static}."
    if speedup >= 1.0:
        return f"{dynamic} gains too little here to be worth it: {speedup:.2f}x faster than {static}."
    return f"{dynamic} is not worth it here: {1 / speedup:.2f}x slower than {static}."
