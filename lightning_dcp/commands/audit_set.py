"""What ``lightning-dcp audit`` keeps of real batches: lengths and segments, no text, and which boundaries were unsafe."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from lightning_dcp.commands.audit_settings import AuditSettings
from lightning_dcp.errors import BatchError, DataError
from lightning_dcp.segments import SampleSegments, as_segments

KIND = "lightning-dcp boundaries"
VERSION = 1


@dataclass(frozen=True)
class AuditedSample:
    """One sample, as far as boundaries go.

    Attributes:
        name: its id; with the number of its batch before it where ids alone are not unique.
        length: in tokens.
        segments: what it is made of.
    """

    name: str
    length: int
    segments: SampleSegments = ()


AuditedBatch = tuple[AuditedSample, ...]


class Boundary(NamedTuple):
    """What can be unsafe: a segment (None: tokens that no segment names), and in which way (a finding's kind)."""

    kind: str
    sample: str
    segment: int | None


@dataclass(frozen=True)
class RegressionSet:
    """Batches that were audited once.

    Attributes:
        settings: what they were audited for.
        batches: in the order of the data.
        unsafe: what was unsafe then.
        reading: how they were read: ``batches``, ``batch_size`` and ``seed``.
        given: names of the settings that were options of the command, and not from a run's configuration.
    """

    settings: AuditSettings
    batches: tuple[AuditedBatch, ...]
    unsafe: frozenset[Boundary]
    reading: Mapping[str, int | None]
    given: tuple[str, ...] = ()

    def save(self, path: str) -> None:
        """Write it as JSON, a line a sample, so that a diff of two shows what changed."""
        unsafe = sorted(self.unsafe, key=lambda b: (b.sample, b.kind, -1 if b.segment is None else b.segment))
        head = {
            "what": KIND,
            "version": VERSION,
            "settings": self.settings.to_json(),
            "reading": dict(self.reading),
            "given": list(self.given),
            "unsafe": [list(boundary) for boundary in unsafe],
        }
        lines = [",\n".join(f"  {json.dumps(_sample_to_json(sample))}" for sample in batch) for batch in self.batches]
        batches = ",\n".join(f" [\n{batch}\n ]" for batch in lines)
        text = json.dumps(head, indent=1).removesuffix("\n}")
        Path(path).write_text(f'{text},\n "batches": [\n{batches}\n ]\n}}\n', encoding="utf-8")

    @classmethod
    def load(cls, path: str) -> RegressionSet:
        """Read what :meth:`save` wrote.

        Raises:
            DataError: it is something else.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
            if not isinstance(data, dict) or (data.get("what"), data.get("version")) != (KIND, VERSION):
                raise DataError(f"{path} is no set of boundaries that `lightning-dcp audit --save` wrote")
            batches = tuple(tuple(_sample_from_json(sample) for sample in batch) for batch in data["batches"])
            unsafe = frozenset(Boundary(*values) for values in data["unsafe"])
            settings = AuditSettings.from_json(data["settings"])
            given = tuple(name for name in data.get("given", ()) if hasattr(settings, name))
            return cls(settings, batches, unsafe, data["reading"], given)
        except (OSError, ValueError, KeyError, TypeError, BatchError) as error:
            raise DataError(f"{path} cannot be read as a set of boundaries: {error!r:.300}") from error


def named(
    batches: Iterable[tuple[Sequence[Any], Sequence[int], Sequence[SampleSegments] | None]],
) -> tuple[AuditedBatch, ...]:
    """Batches of ``(ids, lengths, segments)`` as audited ones; ids that are not unique get their batch's number before them."""
    read = list(batches)
    counts = Counter(str(sample) for ids, _, _ in read for sample in ids)
    unique = all(count == 1 for count in counts.values())
    return tuple(
        tuple(
            AuditedSample(str(name) if unique else f"{number}:{name}", int(length), () if own is None else own[place])
            for place, (name, length) in enumerate(zip(ids, lengths, strict=True))
        )
        for number, (ids, lengths, own) in enumerate(read)
    )


def _sample_to_json(sample: AuditedSample) -> dict[str, Any]:
    return {"sample": sample.name, "length": sample.length, "segments": [list(segment) for segment in sample.segments]}


def _sample_from_json(data: Mapping[str, Any]) -> AuditedSample:
    segments = as_segments(data["segments"], data["length"], sample=data["sample"])
    return AuditedSample(data["sample"], data["length"], segments)
