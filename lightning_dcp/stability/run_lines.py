"""Records of steps as lines of JSON, and which details are left out where they would take too much room."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from lightning_dcp.errors import DataError
from lightning_dcp.stability.record import StepRecord

_DECIMALS = 9
"""Of times in seconds: no clock tells less."""
_OF_RANKS = ("ranks", "links", "probes")
_LAST = 16
"""Slowest steps that keep their packs for longest."""


def to_line(record: StepRecord) -> str:
    """One record as JSON, times to the nanosecond; sample ids that JSON does not know become text."""
    return _dump(record)


def _dump(values: Any) -> str:
    return json.dumps(values, separators=(",", ":"), default=_plain) + "\n"


def _plain(value: Any) -> Any:
    """Records as mappings, numbers of numpy and torch as numbers, all else as text.

    Mappings by hand: ``dataclasses.asdict`` would take most of a step's time on disk.
    """
    if hasattr(value, "__dataclass_fields__"):
        return {n: round(v, _DECIMALS) if type(v) is float else v for n, v in vars(value).items()}
    return value.item() if hasattr(value, "item") else str(value)


def from_line(line: str) -> StepRecord:
    """The record that :func:`to_line` wrote.

    Raises:
        DataError: another text.
    """
    try:
        values = json.loads(line)
        halves = "\\ud" in line or "\\uD" in line  # of UTF-16 pairs; few lines have any, and looking takes time
        return StepRecord.from_json(printable(values) if halves else values)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"no record of a step ({type(error).__name__}: {error})") from error


def printable(value: Any) -> Any:
    """The same JSON value, with escapes in the place of what no file and no terminal takes: halves of UTF-16 pairs."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, dict):
        return {printable(name): printable(part) for name, part in value.items()}
    return [printable(part) for part in value] if isinstance(value, list) else value


def without_intervals(record: StepRecord) -> StepRecord:
    """The same record; its packs only say when they began and ended."""
    return replace(record, packs=tuple(replace(pack, intervals=()) for pack in record.packs))


def thinned(lines: Sequence[str], most_bytes: int) -> list[str]:
    """The same steps with fewer details, in at most so many bytes where that can be.

    Seconds, tokens, prediction and events of each step stay. What goes, until the rest fits: packs of steps without
    intervals; intervals and packs of all but the slowest steps, in halves; what ranks and links took in every second of the other
    steps that still have them, again and again; what is left.

    Args:
        lines: as :func:`to_line` writes them.
        most_bytes: of all lines; they are ASCII.
    """
    kept = list(lines)
    size = sum(map(len, kept))
    for thinner in _ways(kept):
        if size <= most_bytes:
            break
        for i in thinner:
            before = len(kept[i])
            kept[i] = _without(kept[i])
            size += len(kept[i]) - before
    return kept


def _ways(lines: list[str]) -> Iterator[list[int]]:
    """Numbers of the lines that lose details, a set at a time; each is looked for when those before have lost theirs."""
    yield [i for i, line in enumerate(lines) if _has(line, "packs") and '"intervals":[{' not in line]
    while len(slowest := _slowest_with_packs(lines)) > _LAST:
        yield slowest[max(_LAST, len(slowest) // 2) :]
    while full := _full_without_packs(lines):
        yield full[1::2] or full
    while slowest := _slowest_with_packs(lines):
        yield slowest[len(slowest) // 2 :]
        yield _full_without_packs(lines)


def _has(line: str, name: str) -> bool:
    """Whether a list of that name holds something. Only of the record's own: inside of texts, quotes are escaped."""
    return f'"{name}":[]' not in line


def _full_without_packs(lines: list[str]) -> list[int]:
    return [
        i for i, line in enumerate(lines) if not _has(line, "packs") and any(_has(line, name) for name in _OF_RANKS)
    ]


def _slowest_with_packs(lines: list[str]) -> list[int]:
    return sorted((i for i, line in enumerate(lines) if _has(line, "packs")), key=lambda i: -_seconds(lines[i]))


def _seconds(line: str) -> float:
    _, _, rest = line.partition('"seconds":')
    return float(rest.partition(",")[0])


def _without(line: str) -> str:
    """Packs go first, then what ranks and links took. Only the latter are parsed: packs can be long, and training waits."""
    if not _has(line, "packs"):
        return _dump(json.loads(line) | {name: [] for name in _OF_RANKS})
    start, end = line.index('"packs":[') + len('"packs":['), line.rindex('],"events":')
    return line[:start] + line[end:]
