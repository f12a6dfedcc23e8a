"""Checks of the data modules' arguments: every problem is found, not only the first."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_dcp.data.collate import COLLATORS
from lightning_dcp.errors import Problem


def argument_problems(
    *,
    batch_size: object,
    max_length: object,
    format: object,
    val_fraction: object,
    num_workers: object,
    limit: object,
    persistent_workers: bool,
) -> list[Problem]:
    """Problems of the arguments all data modules share."""
    problems = [
        *whole_number_problems("batch_size", batch_size, at_least=1),
        *whole_number_problems("max_length", max_length, at_least=2),
        *whole_number_problems("num_workers", num_workers, at_least=0),
        *([] if limit is None else whole_number_problems("limit", limit, at_least=1)),
    ]
    if not isinstance(format, str) or format not in COLLATORS:
        problems.append(Problem(f"format={format!r}", "no such batch format", f"one of {', '.join(COLLATORS)}"))
    if not isinstance(val_fraction, int | float) or not 0 <= val_fraction < 1:
        remedy = "a share from 0 up to, but not including, 1"
        problems.append(Problem(f"val_fraction={val_fraction!r}", "not a share that leaves training data", remedy))
    if persistent_workers and num_workers == 0:
        remedy = "num_workers of 1 or more, or persistent_workers=False"
        problems.append(Problem("persistent_workers=True", "num_workers=0", remedy))
    return problems


def suffix_problems(suffixes: Sequence[str]) -> list[Problem]:
    """Problems of file-name suffixes."""
    asked, remedy = f"suffixes={list(suffixes)!r}", "suffixes with their dot, such as ['.txt', '.jsonl']"
    if not suffixes:
        return [Problem(asked, "no suffix, so no file of a folder would match", remedy)]
    undotted = [suffix for suffix in suffixes if not suffix.startswith(".")]
    return [Problem(asked, f"without a dot: {', '.join(map(repr, undotted))}", remedy)] if undotted else []


def whole_number_problems(name: str, value: object, *, at_least: int) -> list[Problem]:
    """The problem of a value that is no whole number of so much or more."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= at_least:
        return []
    return [Problem(f"{name}={value!r}", f"not a whole number of {at_least} or more", f"{name}={at_least} or more")]
