"""What audits of a run found: told a few times, counted always."""

from __future__ import annotations

import logging
from collections import Counter

from lightning_dcp.boundaries.findings import Audit, Kind, Level

log = logging.getLogger(__name__)

TOLD = 3
"""Findings of one kind and level that are told one by one; later ones are only counted."""


class AuditLog:
    """Counts findings of level ``warn`` and ``refuse``.

    Args:
        speaks: whether this rank tells them.

    Attributes:
        found: how many there were, by level and kind.
        plans: batches that got another plan, and those for which none was found that keeps the budgets.
    """

    def __init__(self, *, speaks: bool) -> None:
        self.found: Counter[tuple[Level, Kind]] = Counter()
        self.plans: Counter[str] = Counter()
        self._speaks = speaks

    def take(self, audit: Audit | None, batch: int) -> None:
        """Count what the audit of a batch found, and tell what is new."""
        if audit is None:
            return
        for note in audit.notes:
            key = "batches not replanned" if note.startswith("not replanned") else "batches replanned"
            self.plans[key] += 1
            if self.plans[key] <= TOLD:
                self._say(batch, note, self.plans[key] == TOLD)
        for finding in audit.at_least("warn"):
            what = finding.level, finding.kind
            self.found[what] += 1
            if self.found[what] <= TOLD:
                self._say(batch, f"{finding.level}: {finding.text}", self.found[what] == TOLD)

    def _say(self, batch: int, text: str, last: bool) -> None:
        if self._speaks:
            rest = " (more of this kind are counted, not told)" if last else ""
            log.warning("boundary audit, batch %d: %s%s", batch, text, rest)

    @property
    def summary(self) -> str:
        """All counts in words; empty if nothing was found."""
        counts = [f"{count} {kind} ({level})" for (level, kind), count in sorted(self.found.items())]
        return ", ".join([*counts, *(f"{count} {what}" for what, count in sorted(self.plans.items()))])
