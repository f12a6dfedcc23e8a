"""A run's record on disk: what the run was, and one line a step; safe to read while the run goes on, and after a kill."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lightning_dcp.errors import DataError
from lightning_dcp.stability.record import StepRecord
from lightning_dcp.stability.run_lines import from_line, printable, thinned, to_line

FOLDER = "stability"
"""Inside the logger's folder of a run."""
META, STEPS = "run.json", "steps.jsonl"
FORMAT = 1
"""Of both files; files of another format are refused."""


@dataclass(frozen=True)
class Run:
    """What was recorded of a run.

    Attributes:
        path: the folder.
        meta: what the run was. ``format`` and ``starts`` (ISO times, one a start or resumption) are always there; the
            others are what was given to :class:`RunFolder` (:func:`lightning_dcp.callbacks.stability.run_facts`).
        steps: ascending, each number once. Packs, intervals, links and ranks may be missing from some, in long runs.
    """

    path: Path
    meta: Mapping[str, Any]
    steps: tuple[StepRecord, ...]

    def timed(self) -> tuple[StepRecord, ...]:
        """The steps that were recorded in full: their packs have intervals."""
        return tuple(step for step in self.steps if any(pack.intervals for pack in step.packs))


class RunFolder:
    """Writes a run's record, on one rank.

    ``run.json`` is written at once, ``steps.jsonl`` every few steps. A folder that has steps already is gone on with: a step
    that is run again replaces the older, and all that came after that.

    Args:
        path: the folder; it is made.
        meta: JSON-able values: what the run is.
        flush_every: records that are held back at most.
        most_bytes: a longer ``steps.jsonl`` is thinned to half of this: details of steps go, never a step.

    Raises:
        OSError: the folder cannot be written.
        DataError: it holds something else.
    """

    def __init__(
        self, path: str | Path, meta: Mapping[str, Any], *, flush_every: int = 10, most_bytes: int = 32 << 20
    ) -> None:
        self.path, self.flush_every, self.most_bytes = Path(path), flush_every, most_bytes
        self._pending: list[str] = []
        self.path.mkdir(parents=True, exist_ok=True)
        before = _read_meta(self.path / META).get("starts", []) if (self.path / META).exists() else []
        now = datetime.now(UTC).isoformat(timespec="seconds")
        _replace(
            self.path / META,
            json.dumps(dict(meta) | {"format": FORMAT, "starts": [*before, now]}, indent=1, default=str) + "\n",
        )
        _drop_broken_end(self.path / STEPS)

    def add(self, record: StepRecord) -> None:
        """Record a step; one with alarms or actions is on disk when this returns.

        Raises:
            OSError: it cannot be written.
        """
        self._pending.append(to_line(record))
        if record.events or len(self._pending) >= self.flush_every:
            self.flush()

    def flush(self) -> None:
        """Write what was held back.

        Raises:
            OSError: it cannot be written.
        """
        if not self._pending:
            return
        # Opened for each write: an open file would be shared with, and written again by, processes that a loader forks.
        with (self.path / STEPS).open("a", encoding="utf-8") as file:
            file.write("".join(self._pending))
            size = file.tell()
        self._pending.clear()
        if size > self.most_bytes:
            self._thin()

    def _thin(self) -> None:
        lines = (self.path / STEPS).read_text(encoding="utf-8").splitlines(keepends=True)
        text = "".join(thinned(lines, self.most_bytes // 2))
        self.most_bytes = max(self.most_bytes, 2 * len(text))  # not again at each step where no more can go
        _replace(self.path / STEPS, text)

    @staticmethod
    def read(path: str | Path) -> Run:
        """Read a run's record, also one that is being written.

        Args:
            path: the folder, or the run's folder around it.

        Raises:
            DataError: no record there, or a broken one (a last line that was not written to its end is left out).
        """
        given = Path(path)
        folder = given / FOLDER if (given / FOLDER / META).exists() else given
        if not (folder / META).exists():
            raise DataError(
                f"{given}: holds no record of a run (no {META}, nor {FOLDER}/{META}). Give the folder that a run with a "
                "StabilityMonitor among its callbacks logged to"
            )
        return Run(folder, _read_meta(folder / META), tuple(_read_steps(folder / STEPS)))


def _read_meta(path: Path) -> dict[str, Any]:
    try:
        meta = printable(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: cannot be read as the facts of a run ({error})") from error
    found = meta.get("format") if isinstance(meta, dict) else None
    if found != FORMAT:
        raise DataError(f"{path}: format {found!r}, but this release reads format {FORMAT}; move the folder away")
    return dict(meta)


def _read_steps(path: Path) -> list[StepRecord]:
    """Records in order; one whose step is not above those before it replaces them from that step on."""
    steps: list[StepRecord] = []
    for record in _records(path):
        while steps and steps[-1].step >= record.step:
            steps.pop()
        steps.append(record)
    return steps


def _records(path: Path) -> Iterator[StepRecord]:
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith("\n"):
                return  # still being written, or cut off by a kill
            try:
                yield from_line(line)
            except DataError as error:
                raise DataError(f"{path}:{number}: {error}; remove the line to read the others") from error


def _drop_broken_end(path: Path) -> None:
    """Cut off a last line that was not written to its end, so that the next one does not join it."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        content = file.read()
        file.truncate(content.rfind(b"\n") + 1)


def _replace(path: Path, text: str) -> None:
    """Write a file so that readers see the old one or the new one, whole."""
    temporary = path.with_name(f"{path.name}.new")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
