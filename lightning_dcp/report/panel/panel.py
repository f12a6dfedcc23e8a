"""All that the panel shows, as plain values: what draws it computes nothing."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_dcp.report.panel.comparison import Comparison, compare
from lightning_dcp.report.panel.events import EventLog, event_log
from lightning_dcp.report.panel.facts import facts, run_names
from lightning_dcp.report.panel.hot import HotList, hot_list
from lightning_dcp.report.panel.links import LinkMap, link_map
from lightning_dcp.report.panel.measured import Measured, measure
from lightning_dcp.report.panel.ranks import RankBars, rank_bars
from lightning_dcp.report.panel.reasons import StepReason, step_reasons
from lightning_dcp.report.panel.series import StepSeries, step_series
from lightning_dcp.report.panel.shards import ShardBudgets, shard_budgets
from lightning_dcp.report.panel.summary import RunSummary, summarise
from lightning_dcp.report.panel.timeline import StepTimeline, timelines
from lightning_dcp.stability.run_folder import Run


@dataclass(frozen=True)
class Panel:
    """What the panel of one run shows; each part in the module of its class."""

    summary: RunSummary
    facts: tuple[tuple[str, str], ...]
    series: StepSeries
    reasons: tuple[StepReason, ...]
    timelines: tuple[StepTimeline, ...]
    links: LinkMap
    ranks: RankBars
    shards: ShardBudgets
    hot: HotList
    events: EventLog
    comparison: Comparison | None
    other_facts: tuple[tuple[str, str], ...] = ()


def panel_of(run: Run, other: Run | None = None) -> Panel:
    """Everything about a run.

    Args:
        run: what was recorded of it.
        other: a run to compare it with.

    Raises:
        DataError: one of them has no step yet.
    """
    names = run_names(run, other)
    first = _summarised(run, names[0])
    summary, measured = first
    return Panel(
        summary,
        facts(run.meta),
        step_series(measured),
        step_reasons(measured),
        timelines(measured.records, measured.median_s),
        link_map(measured.records, measured.num_ranks),
        rank_bars(measured),
        shard_budgets(measured.records, run.meta),
        hot_list(measured.records, measured.median_s),
        event_log(run.steps),
        None if other is None else compare(first, _summarised(other, names[1])),
        () if other is None else facts(other.meta),
    )


def _summarised(run: Run, name: str) -> tuple[RunSummary, Measured]:
    """The numbers of a run without the first steps, which the monitor did not count; of all if there are no others."""
    given = run.meta.get("warmup_batches")
    warmup = given if isinstance(given, int) and 0 < given < len(run.steps) else 0
    measured = measure(run.steps[warmup:])
    return summarise(name, measured, [event for step in run.steps for event in step.events], warmup), measured
