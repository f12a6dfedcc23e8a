"""``lightning-dcp audit``: where packs of one's data are cut, and a set of batches that keeps this from getting worse."""

from __future__ import annotations

import json as jsonlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_dcp.commands.audit_check import AuditedBatches, told_unsafe, with_new_data
from lightning_dcp.commands.audit_data import read_batches
from lightning_dcp.commands.audit_run import run_settings
from lightning_dcp.commands.audit_set import AuditedBatch, RegressionSet
from lightning_dcp.commands.audit_settings import AuditSettings, LayoutName
from lightning_dcp.commands.audit_tell import counted, show
from lightning_dcp.errors import BoundaryError, Problem, raise_problems
from lightning_dcp.report.figure import folder_problems
from lightning_dcp.schedule.cost_file import load_cost_model
from lightning_dcp.schedule.plan import Mode

BATCHES = 10


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
    replan: bool | None = None,
    cost_model: str | None = None,
    batches: int | None = None,
    batch_size: int | None = None,
    seed: int | None = None,
) -> AuditedBatches:
    """Audit where packs of your data are cut, before anything is trained; keep a set of batches, and check it later.

    Settings that are not given are those of the DCPStrategy where --data is a run's whole configuration. With --check they
    are as in the set, but for what such a configuration says and no option said when the set was made. It fails, with exit
    status 1, when a boundary that was safe then is unsafe now: with other settings, or with --data, when template or data
    changed the segments of the set's samples.

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
        replan: make another plan where shards are over their budgets, as on_violation="replan" does in training; `false`: do not.
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
        "replan": replan,
        "cost": None if cost_model is None else load_cost_model(cost_model),
    }
    given = {name: value for name, value in given.items() if value is not None}
    fixed = given if kept is None else given | {name: getattr(kept.settings, name) for name in kept.given} | given
    run = None if data is None else run_settings(data)
    settings = AuditSettings(load_cost_model("h100")) if kept is None else kept.settings
    settings = replace(settings, **({} if run is None else dict(run.values)) | fixed)
    raise_problems(settings.problems())
    how = {"batches": BATCHES, "batch_size": None, "seed": 0} if kept is None else dict(kept.reading)
    how |= {name: value for name, value in reading.items() if value is not None}
    read, missing, total = _batches(data, kept, how)
    now = AuditedBatches.of(settings, read)
    show(now, kept, missing, total, [] if run is None or data is None else [run.told(data, fixed)])
    if json is not None:
        Path(json).write_text(jsonlib.dumps(_to_json(now), indent=1) + "\n", encoding="utf-8")
    worse = None if kept is None else told_unsafe(kept, now)
    if worse is not None:
        raise BoundaryError(worse)
    if save is not None:
        RegressionSet(settings, now.batches, frozenset(now.unsafe), how, tuple(fixed)).save(save)
        sys.stdout.write(f"wrote {save} ({counted(now)}, {len(now.samples)} samples)\n")
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
) -> tuple[tuple[AuditedBatch, ...], list[str], int | None]:
    """The batches to audit, which samples of the set are no longer there, and about how many batches the data has."""
    if data is None:
        return (() if kept is None else kept.batches), [], None
    read, total = read_batches(data, how["batches"], how["batch_size"], how["seed"])
    return (read, [], total) if kept is None else (*with_new_data(kept, read), total)


def _to_json(now: AuditedBatches) -> dict[str, Any]:
    return {"settings": now.settings.to_json(), "batches": [audit.to_json() for audit in now.audits]}
