"""Audits of batches, and what became unsafe between two."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lightning_dcp.boundaries.findings import Audit, Finding
from lightning_dcp.boundaries.settle import settle
from lightning_dcp.commands.audit_set import AuditedBatch, AuditedSample, Boundary, RegressionSet
from lightning_dcp.commands.audit_settings import AuditSettings
from lightning_dcp.errors import DataError


@dataclass(frozen=True)
class AuditedBatches:
    """Batches with their audits.

    Attributes:
        settings: what they were audited for.
        batches: the samples.
        audits: of each batch.
    """

    settings: AuditSettings
    batches: tuple[AuditedBatch, ...]
    audits: tuple[Audit, ...]

    @classmethod
    def of(cls, settings: AuditSettings, batches: Sequence[AuditedBatch]) -> AuditedBatches:
        """Plan, cut and audit each batch.

        Raises:
            PlanError: a batch that cannot be planned with these settings.
        """
        return cls(settings, tuple(batches), tuple(_audit(settings, batch) for batch in batches))

    @property
    def unsafe(self) -> dict[Boundary, Finding]:
        """What is unsafe, with the first finding that says so."""
        found: dict[Boundary, Finding] = {}
        for finding in (finding for audit in self.audits for finding in audit.at_least("warn")):
            found.setdefault(boundary_of(finding), finding)
        return found

    @property
    def samples(self) -> dict[str, AuditedSample]:
        """All samples by name."""
        return {sample.name: sample for batch in self.batches for sample in batch}


def boundary_of(finding: Finding) -> Boundary:
    """What a finding says is unsafe."""
    return Boundary(finding.kind, str(finding.sample), finding.segment)


def _audit(settings: AuditSettings, batch: AuditedBatch) -> Audit:
    lengths = [sample.length for sample in batch]
    plan = settings.scheduler().schedule(lengths)
    settled = settle(
        plan,
        lengths,
        [sample.segments for sample in batch],
        settings.budget,
        settings.cost,
        "replan" if settings.replan else "warn",
        sample_ids=[sample.name for sample in batch],
        sizes=settings.sizes,
    )
    return settled.audit or Audit(())


def with_new_data(kept: RegressionSet, read: Sequence[AuditedBatch]) -> tuple[tuple[AuditedBatch, ...], list[str]]:
    """The batches of a set with their samples as they are in the data now; and the names of those that are there no more.

    Raises:
        DataError: none of them is there.
    """
    now = {sample.name: sample for batch in read for sample in batch}
    missing = [sample.name for batch in kept.batches for sample in batch if sample.name not in now]
    batches = tuple(tuple(now[sample.name] for sample in batch if sample.name in now) for batch in kept.batches)
    if not any(batches):
        raise DataError("no sample of the set is in the data: is it another data set, or are its ids others?")
    return tuple(batch for batch in batches if batch), missing


def newly_unsafe(kept: RegressionSet, now: AuditedBatches) -> dict[Boundary, Finding]:
    """What was safe and is unsafe now, with the first finding that says so."""
    return {boundary: finding for boundary, finding in now.unsafe.items() if boundary not in kept.unsafe}


def told_unsafe(kept: RegressionSet, now: AuditedBatches) -> str | None:
    """What changed, once, and a line for each segment that was safe in some way and is unsafe now; None if none is."""
    kinds: dict[tuple[str, int | None], list[str]] = {}
    for kind, sample, segment in newly_unsafe(kept, now):
        kinds.setdefault((sample, segment), []).append(kind)
    if not kinds:
        return None
    lines = [
        f"sample {sample}, {_segment(now.samples[sample], segment)}: {', '.join(found)}"
        for (sample, segment), found in kinds.items()
    ]
    head = f"{len(kinds)} segment(s) whose boundaries were safe and are unsafe now:"
    return "\n  ".join([head, *_causes(kept, now, [sample for sample, _ in kinds]), *lines])


def _causes(kept: RegressionSet, now: AuditedBatches, names: Sequence[str]) -> Iterator[str]:
    """What changed in the settings and in these samples, each said once."""
    settings = now.settings.changes_from(kept.settings)
    if settings:
        yield f"changed: {'; '.join(f'setting {change}' for change in settings)}"
    before = {sample.name: sample for batch in kept.batches for sample in batch}
    alike = 0
    for name in dict.fromkeys(names):
        changes = list(_data_changes(before[name], now.samples[name]))
        alike += not changes
        if changes:
            yield f"changed: sample {name}: {'; '.join(changes)}"
    if alike and not settings:
        yield f"changed: for {alike} sample(s) others of their batches, or the way packs are planned and cut"


def changed_samples(kept: RegressionSet, now: AuditedBatches) -> list[str]:
    """The names of samples whose length or segments are others than in the set."""
    before = {sample.name: sample for batch in kept.batches for sample in batch}
    return [name for name, sample in now.samples.items() if sample != before[name]]


def _segment(sample: AuditedSample, place: int | None) -> str:
    if place is None:
        return "tokens of no segment"
    segment = sample.segments[place]
    return f"segment {place} ({segment.kind}, {segment.start}..{segment.end})"


def _data_changes(before: AuditedSample, now: AuditedSample) -> Iterator[str]:
    if before.length != now.length:
        yield f"the sample's length: {before.length} -> {now.length} tokens"
    if len(before.segments) != len(now.segments):
        yield f"its segments: {len(before.segments)} -> {len(now.segments)}"
    for place, (old, new) in enumerate(zip(before.segments, now.segments, strict=False)):
        if old != new:
            was, became = (f"{s.kind} {s.start}..{s.end} of density {s.density:g}" for s in (old, new))
            yield f"segment {place}: {was} -> {became}"
            return  # what follows is mostly moved by it
