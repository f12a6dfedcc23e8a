"""What a run was, in words: its name, and the entries of its record's head."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_dcp.report.panel.shards import short
from lightning_dcp.stability.run_folder import FOLDER, Run

MOST_TEXT = 500
"""Characters of a value; what is longer is cut."""
MOST_ITEMS = 16
HIDDEN = ("format", "starts", "name", "link_table")
"""Said elsewhere: the panel's map of links has their expected times."""


def run_names(run: Run, other: Run | None) -> tuple[str, str]:
    """Names of two runs that differ: of their folders, with as much of the path as it takes.

    A logger's ``version_0`` says nothing alone, so it gets the folder above.

    Args:
        run: the one that the panel is about.
        other: the one it is compared with, if any; its name is empty otherwise.
    """
    first = _parts(run)
    if other is None:
        return _named(_tail(first, _depth(first)), run), ""
    second = _parts(other)
    depth = max(_depth(first), _depth(second))
    while first[-depth:] == second[-depth:] and depth < max(len(first), len(second)):
        depth += 1
    names = _named(_tail(first, depth), run), _named(_tail(second, depth), other)
    return names if names[0] != names[1] else (names[0], f"{names[1]} (again)")


def _parts(run: Run) -> tuple[str, ...]:
    path = Path(run.path).resolve()
    path = path.parent if path.name == FOLDER else path
    return path.parts or ("run",)


def _depth(parts: Sequence[str]) -> int:
    return 2 if re.fullmatch(r"version_\d+", parts[-1]) else 1


def _tail(parts: Sequence[str], depth: int) -> str:
    return "/".join(part for part in parts[-depth:] if part != "/") or "run"


def _named(folder: str, run: Run) -> str:
    """A run's own name, or its folder's; with the way it planned, where the record says so."""
    dynamic = run.meta.get("dynamic_context_parallel")
    way = {True: " (dynamic)", False: " (static)"}.get(dynamic, "") if isinstance(dynamic, bool) else ""
    return short(str(run.meta.get("name") or folder)) + way


def facts(meta: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Names and values of what the run was, as text."""
    found = [(str(key).replace("_", " "), words(value)) for key, value in meta.items() if key not in HIDDEN]
    starts = meta.get("starts")
    if isinstance(starts, Sequence) and not isinstance(starts, str) and starts:
        again = len(starts) - 1
        found.insert(
            0, ("started", f"{starts[0]}" + (f", resumed {again} time{'' if again == 1 else 's'}" if again else ""))
        )
    return tuple((key, text) for key, text in found if text)


def words(value: Any) -> str:
    """A JSON value in a line of text; nothing for None and for what is empty."""
    return short(_words(value), MOST_TEXT)


def _words(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Mapping):
        parts = [(str(key).replace("_", " "), _words(entry)) for key, entry in value.items()]
        return ", ".join(f"{key} {text}" for key, text in parts if text)
    if isinstance(value, Sequence) and not isinstance(value, str):
        shown = ", ".join(filter(None, map(_words, value[:MOST_ITEMS])))
        return shown + (f", ... ({len(value)} in all)" if len(value) > MOST_ITEMS else "")
    return str(value)
