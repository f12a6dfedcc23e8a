"""What ``lightning-dcp audit`` prints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from lightning_dcp.boundaries.findings import LEVELS, Finding
from lightning_dcp.commands.audit_check import AuditedBatches, boundary_of, changed_samples, newly_unsafe
from lightning_dcp.commands.audit_set import RegressionSet

MOST_ROWS = 40
COLORS = {"ok": "green", "warn": "yellow", "refuse": "red"}
Row = tuple[int, Finding]


def show(
    now: AuditedBatches, kept: RegressionSet | None, missing: Sequence[str], total: int | None, first: Sequence[str]
) -> None:
    """Print an audit; beside a set, only what is new since then.

    Args:
        now: the audit.
        kept: the set that it is compared with.
        missing: samples of the set that are in the data no more.
        total: about how many batches the data has; None: unknown.
        first: lines to begin with.
    """
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, 120)
    for line in first:
        console.print(line, markup=False, soft_wrap=True)
    _tell_data(console, now, total)
    if kept is not None:
        _tell_changes(console, now, kept, missing)
    rows = [(n, finding) for n, audit in enumerate(now.audits) for finding in audit.at_least("warn")]
    known = [] if kept is None else _known(rows, kept)
    shown = rows if kept is None else _new(rows, now, kept)
    _table(console, shown, "Findings" if kept is None else "New since the set was made")
    for number, audit in enumerate(now.audits):
        for note in audit.notes:
            console.print(f"batch {number}: {note}", markup=False)
    worst = max((finding.level for _, finding in shown), key=LEVELS.index, default="ok")
    told = _counts(shown) if kept is None else f"new: {_counts(shown)}; as in the set: {_counts(known)}"
    console.print(f"{told}: [bold {COLORS[worst]}]{worst}[/]")


def _new(rows: Sequence[Row], now: AuditedBatches, kept: RegressionSet) -> list[Row]:
    """The first finding of each boundary that became unsafe."""
    new = {id(finding) for finding in newly_unsafe(kept, now).values()}
    return [row for row in rows if id(row[1]) in new]


def _known(rows: Sequence[Row], kept: RegressionSet) -> list[Row]:
    """The first finding of each boundary that was unsafe before."""
    first: dict[tuple[object, ...], Row] = {}
    for row in rows:
        if boundary_of(row[1]) in kept.unsafe:
            first.setdefault(boundary_of(row[1]), row)
    return list(first.values())


def _counts(rows: Sequence[Row]) -> str:
    levels: Mapping[str, int] = Counter(finding.level for _, finding in rows)
    segments = len({(str(finding.sample), finding.segment) for _, finding in rows})
    of = f" (of {segments} segment{'s' * (segments != 1)})" if rows else ""
    return f"{levels['warn']} warn, {levels['refuse']} refuse{of}"


def _table(console: Console, rows: Sequence[Row], title: str) -> None:
    if not rows:
        return
    table = Table(title=title, title_justify="left")
    for heading in ("batch", "level", "kind", "what"):
        table.add_column(heading)
    for number, finding in sorted(rows, key=lambda row: -LEVELS.index(row[1].level))[:MOST_ROWS]:
        level = f"[{COLORS[finding.level]}]{finding.level}[/]"
        table.add_row(str(number), level, finding.kind, finding.text.replace("[", "\\["))
    console.print(table)
    if len(rows) > MOST_ROWS:
        console.print(f"and {len(rows) - MOST_ROWS} more; --json has all")


def _tell_data(console: Console, now: AuditedBatches, total: int | None) -> None:
    samples = [sample for batch in now.batches for sample in batch]
    dense = sum(now.settings.budget.is_dense(segment) for sample in samples for segment in sample.segments)
    segments = sum(len(sample.segments) for sample in samples)
    of = f"{len(now.batches)} of about {total} batches" if total and total > len(now.batches) else counted(now)
    console.print(
        f"{of} of {len(samples)} samples in all, {segments} segments, {dense} of them dense; "
        f"{now.settings.ranks} ranks, layout {now.settings.layout}",
        markup=False,
    )


def counted(now: AuditedBatches) -> str:
    """How many batches there are, in words."""
    return f"{len(now.batches)} batch{'es' * (len(now.batches) != 1)}"


def _tell_changes(console: Console, now: AuditedBatches, kept: RegressionSet, missing: Sequence[str]) -> None:
    changes = now.settings.changes_from(kept.settings)
    console.print(f"settings that changed since the set was made: {'; '.join(changes) or 'none'}", markup=False)
    console.print(f"samples that changed: {_some(changed_samples(kept, now))}", markup=False)
    if missing:
        console.print(f"samples of the set that are not in the data any more: {_some(missing)}", markup=False)


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:10])
    return f"{len(names)} ({shown}{', ...' if len(names) > 10 else ''})" if names else "none"
