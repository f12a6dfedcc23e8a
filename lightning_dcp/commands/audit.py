"""``lightning-dcp audit``: where packs of one's data are cut, and a set of batches that keeps this from getting worse."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lightning_dcp.boundaries.findings import LEVELS
from lightning_dcp.commands.audit_check import AuditedBatches, changed_samples, newly_unsafe, with_new_data
from lightning_dcp.commands.audit_data import read_batches
from lightning_dcp.commands.audit_set import AuditedBatch, RegressionSet
from lightning_dcp.commands.audit_settings import AuditSettings, LayoutName
from lightning_dcp.errors import BoundaryError, Problem, raise_problems
from lightning_dcp.report.figure import folder_problems
from lightning_dcp.schedule.cost_file import load_cost_model
from lightning_dcp.schedule.plan import Mode

BATCHES = 10
MOST_ROWS = 40
COLORS = {"ok": "green", "warn": "yellow", "refuse": "red"}


def audit(
    data: str | None = None,
    *,
    save: str | None = None,
    check: str | None = None,
    json: str | None = None,
    ranks: int | None = None,
    max_seqlen_per_dp_cp_rank: int | None = None,
    max_tokens: int | None = None,
    dense_limit: int | None = None,
    dense_from: float | None = None,
    tolerance: float | None = None,
    layout: LayoutName | None = None,
    context_parallel_size: int | None = None,
    mode: Mode | None = None,
    min_context_parallel_size: int | None = None,
    max_context_parallel_size: int | None = None,
    replan: bool = False,
    cost_model: str | None = None,
    batches: int | None = None,
    batch_size: int | None = None,
    seed: int | None = None,
) -> AuditedBatches:
    """Audit where packs of your data are cut, before anything is trained; keep a set of batches, and check it later.

    With --check, what is not given is as in the set. It fails, with exit status 1, when a boundary that was safe then is
    unsafe now: with other settings, or with --data, when template or data changed the segments of the set's samples.

    Args:
        data: the YAML of a LightningDataModule (class_path, init_args), or a run's whole configuration.
        save: file for a set of these batches: lengths and segments, no text.
        check: file of such a set to compare with.
        json: file for all findings.
        ranks: ranks of the DPxCP plane; by default 8.
        max_seqlen_per_dp_cp_rank: most tokens that a rank may hold of one micro-batch; by default 8192.
        max_tokens: most tokens of a shard; by default max_seqlen_per_dp_cp_rank.
        dense_limit: most tokens of dense segments in a shard; by default no limit.
        dense_from: a segment of this density or more is dense; by default 1.5.
        tolerance: how much more work than with zigzag the heaviest rank may have, as a share; by default 0.1.
        layout: of every pack: budgeted (the default), zigzag, contiguous, greedy.
        context_parallel_size: of static plans; by default plans are dynamic.
        mode: free (the default) or lockstep.
        min_context_parallel_size: smallest group of the dynamic scheduler.
        max_context_parallel_size: largest group of the dynamic scheduler; by default all ranks.
        replan: make another plan where shards are over their budgets, as on_violation="replan" does in training.
        cost_model: a preset (a100, h100, h200, cpu) or a YAML file as `lightning-dcp calibrate` writes it; by default h100.
        batches: how many are read; by default 10.
        batch_size: samples a batch over all ranks; by default what the data module makes.
        seed: of the draw of batches of that size; by default 0.

    Returns:
        The batches with their audits.

    Raises:
        ConfigurationError: bad options, all at once.
        DataError: data or a set that cannot be used.
        PlanError: a batch that cannot be planned.
        BoundaryError: with --check, boundaries that became unsafe, each with its sample and segment.
    """
    reading = {"batches": batches, "batch_size": batch_size, "seed": seed}
    raise_problems(_problems(data, save, check, json, reading))
    kept = None if check is None else RegressionSet.load(check)
    given: dict[str, Any] = {
        "ranks": ranks,
        "max_seqlen_per_dp_cp_rank": max_seqlen_per_dp_cp_rank,
        "max_tokens": max_tokens,
        "dense_limit": dense_limit,
        "dense_from": dense_from,
        "tolerance": tolerance,
        "layout": layout,
        "context_parallel_size": context_parallel_size,
        "mode": mode,
        "min_context_parallel_size": min_context_parallel_size,
        "max_context_parallel_size": max_context_parallel_size,
        "replan": replan or None,
        "cost": None if cost_model is None else load_cost_model(cost_model),
    }
    settings = AuditSettings(load_cost_model("h100")) if kept is None else kept.settings
    settings = replace(settings, **{name: value for name, value in given.items() if value is not None})
    raise_problems(settings.problems())
    how = {"batches": BATCHES, "batch_size": None, "seed": 0} if kept is None else dict(kept.reading)
    how |= {name: value for name, value in reading.items() if value is not None}
    read, missing = _batches(data, kept, how)
    now = AuditedBatches.of(settings, read)
    _show(now, kept, missing)
    if json is not None:
        Path(json).write_text(jsonlib.dumps(_to_json(now), indent=1) + "\n", encoding="utf-8")
    worse = [] if kept is None else newly_unsafe(kept, now)
    if worse:
        raise BoundaryError("\n  ".join([f"{len(worse)} boundaries were safe and are unsafe now:", *worse]))
    if save is not None:
        RegressionSet(settings, now.batches, frozenset(now.unsafe), how).save(save)
    return now


def _problems(
    data: str | None, save: str | None, check: str | None, json: str | None, reading: dict[str, int | None]
) -> list[Problem]:
    problems = []
    if data is None and check is None:
        remedy = "give --data (a data module's YAML), --check (a set of batches), or both"
        problems.append(Problem("an audit", "neither --data nor --check", remedy))
    for name, least in (("batches", 1), ("batch_size", 1), ("seed", 0)):
        value = reading[name]
        if value is not None and value < least:
            found = f"a number below {least}"
            problems.append(Problem(f"--{name.replace('_', '-')} {value}", found, f"give {least} or more"))
    for option, path in (("--save", save), ("--json", json)):
        problems += [] if path is None else folder_problems(path, option)
    return problems


def _batches(
    data: str | None, kept: RegressionSet | None, how: dict[str, Any]
) -> tuple[tuple[AuditedBatch, ...], list[str]]:
    """The batches to audit, and which samples of the set are no longer there."""
    if data is None:
        return (() if kept is None else kept.batches), []
    read = read_batches(data, how["batches"], how["batch_size"], how["seed"])
    return (read, []) if kept is None else with_new_data(kept, read)


def _to_json(now: AuditedBatches) -> dict[str, Any]:
    return {"settings": now.settings.to_json(), "batches": [audit.to_json() for audit in now.audits]}


# ------------------------------------------------------------------------ telling


def _show(now: AuditedBatches, kept: RegressionSet | None, missing: Sequence[str]) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, 120)
    _tell_data(console, now, kept, missing)
    rows = [(n, finding) for n, audit in enumerate(now.audits) for finding in audit.at_least("warn")]
    if rows:
        table = Table(title="Findings", title_justify="left")
        for heading in ("batch", "level", "kind", "what"):
            table.add_column(heading)
        for number, finding in sorted(rows, key=lambda row: -LEVELS.index(row[1].level))[:MOST_ROWS]:
            level = f"[{COLORS[finding.level]}]{finding.level}[/]"
            table.add_row(str(number), level, finding.kind, _plain(finding.text))
        console.print(table)
        if len(rows) > MOST_ROWS:
            console.print(f"and {len(rows) - MOST_ROWS} more; --json has all")
    for number, audit in enumerate(now.audits):
        for note in audit.notes:
            console.print(f"batch {number}: {note}", markup=False)
    worst = max((audit.level for audit in now.audits), key=LEVELS.index, default="ok")
    console.print(f"{len(rows)} finding(s) of level warn or refuse: [bold {COLORS[worst]}]{worst}[/]")


def _tell_data(console: Console, now: AuditedBatches, kept: RegressionSet | None, missing: Sequence[str]) -> None:
    samples = [sample for batch in now.batches for sample in batch]
    dense = sum(now.settings.budget.is_dense(segment) for sample in samples for segment in sample.segments)
    segments = sum(len(sample.segments) for sample in samples)
    console.print(
        f"{len(now.batches)} batch(es) of {len(samples)} samples in all, {segments} segments, {dense} of them dense; "
        f"{now.settings.ranks} ranks, layout {now.settings.layout}",
        markup=False,
    )
    if kept is None:
        return
    changes = now.settings.changes_from(kept.settings)
    console.print(f"settings that changed since the set was made: {'; '.join(changes) or 'none'}", markup=False)
    changed = changed_samples(kept, now)
    console.print(f"samples that changed: {_some(changed)}", markup=False)
    if missing:
        console.print(f"samples of the set that are not in the data any more: {_some(missing)}", markup=False)


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:10])
    return f"{len(names)} ({shown}{', ...' if len(names) > 10 else ''})" if names else "none"


def _plain(text: str) -> str:
    return text.replace("[", "\\[")
