"""What an audit of boundaries finds."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Level = Literal["ok", "warn", "refuse"]
LEVELS: tuple[Level, ...] = ("ok", "warn", "refuse")
Kind = Literal["tokens", "dense", "oversized", "cut", "imbalance", "dense_run", "distance"]


@dataclass(frozen=True)
class Finding:
    """One thing about one pack.

    Attributes:
        level: ``refuse``: a budget is broken; ``warn``: what costs time or locality; ``ok``: for information.
        kind: ``tokens`` or ``dense``: of the fullest shard, against the budget; ``oversized``: a segment larger than a
            budget by itself; ``cut``: a dense segment on several ranks, or how many plain ones are; ``imbalance``: work of the
            heaviest shard over the mean; ``dense_run``: most dense tokens in a row on one rank; ``distance``: how far
            dense keys travel, in tokens x hops.
        pack: its place in the plan's order.
        text: the same in words.
        rank: place in the plane; None: about the whole pack.
        sample: id of the sample; None: about no one sample.
        segment: place of the segment among those of the sample; None: about no one segment.
        value: what was found.
        limit: what it is held against; None: nothing.
    """

    level: Level
    kind: Kind
    pack: int
    text: str
    rank: int | None = None
    sample: Any = None
    segment: int | None = None
    value: float = 0.0
    limit: float | None = None


@dataclass(frozen=True)
class Audit:
    """All findings about the boundaries of one plan.

    Attributes:
        findings: in the order of packs.
        notes: what was done about them, such as another plan.
    """

    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()

    @property
    def level(self) -> Level:
        """The worst level of all findings."""
        return max((finding.level for finding in self.findings), key=LEVELS.index, default="ok")

    def at_least(self, level: Level) -> tuple[Finding, ...]:
        """The findings of a level or worse."""
        return tuple(f for f in self.findings if LEVELS.index(f.level) >= LEVELS.index(level))

    def lines(self, level: Level = "ok") -> list[str]:
        """A line a finding of this level or worse, worst first, and the notes."""
        found = sorted(self.at_least(level), key=lambda finding: -LEVELS.index(finding.level))
        return [*(f"{finding.level}: {finding.text}" for finding in found), *self.notes]

    def to_json(self) -> dict[str, Any]:
        """JSON-able values; :meth:`from_json` reads them back."""
        findings = [dataclasses.asdict(finding) for finding in self.findings]
        return {"level": self.level, "findings": findings, "notes": list(self.notes)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Audit:
        """Read what :meth:`to_json` wrote."""
        return cls(tuple(Finding(**values) for values in data["findings"]), tuple(data["notes"]))
