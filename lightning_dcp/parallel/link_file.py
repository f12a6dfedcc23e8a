"""Links measured once and kept in a file: whether it fits is decided by one rank, which tells the others."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_dcp.errors import DataError, Problem, raise_problems
from lightning_dcp.parallel.groups import ParallelGroups
from lightning_dcp.parallel.link_measure import measure_link_table, where_measured
from lightning_dcp.parallel.link_table import LinkTable, MeasuredOn

_log = logging.getLogger(__name__)


def load_or_measure(
    path: str | Path | None,
    groups: ParallelGroups,
    device: torch.device,
    say: Callable[[str], None] = _log.info,
) -> LinkTable:
    """The links of the plane: from a file if it is of these machines and ranks, else measured, and written to it.

    Collective over the world. Only the world's first rank reads and writes the file; all get the same table. One line says
    what was done.

    Args:
        path: of the file; None: links are measured and not kept.
        groups: the process groups.
        device: where messages lie.
        say: is told what was done, on the world's first rank.

    Raises:
        ConfigurationError: on all ranks: the file holds something else, or cannot be read or written.
    """
    first = dist.get_rank() == groups.world_ranks[0]
    where = where_measured(groups, device)
    found, why, problem = _told(lambda: _load(path, where), groups)
    raise_problems(problem)
    if found is not None:
        if first:
            say(f"links between {found.ranks} ranks taken from {path}")
        return found
    start = time.perf_counter()
    table = measure_link_table(groups, device)
    seconds = time.perf_counter() - start
    raise_problems(_told(lambda: _write(path, table), groups))
    if first:
        kept = "" if path is None else f" and written to {path}"
        say(f"links between {table.ranks} ranks measured in {seconds:.1f} s{kept}: {why}")
    return table


def _told(decide: Callable[[], Any], groups: ParallelGroups) -> Any:
    """What the world's first rank decides, on all ranks."""
    first = groups.world_ranks[0]
    told = [decide() if dist.get_rank() == first else None]
    dist.broadcast_object_list(told, src=first, group=groups.control)
    return told[0]


def _load(path: str | Path | None, where: MeasuredOn) -> tuple[LinkTable | None, str, list[Problem]]:
    """The table in a file if it fits; else why links are measured, or what forbids it."""
    if path is None:
        return None, "no file for them was named", []
    try:
        if not Path(path).exists():
            return None, "the file was not there yet", []
        table = LinkTable.from_json(json.loads(Path(path).read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError, DataError) as error:
        remedy = "name a file of measured links, or one that is not there yet"
        return None, "", [Problem(f"links_file={str(path)!r}", f"a file that holds none: {error}", remedy)]
    if table.measured_on != where or table.ranks != len(where.hosts):
        return None, "those in the file are of other machines or ranks", []
    return table, "", []


def _write(path: str | Path | None, table: LinkTable) -> list[Problem]:
    """Write a table so that a reader sees the old file or the new one; what forbids it."""
    if path is None:
        return []
    try:
        temporary = Path(path).with_name(f"{Path(path).name}.new")
        temporary.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(table.to_json()) + "\n", encoding="utf-8")
        os.replace(temporary, path)
    except (OSError, ValueError) as error:
        return [Problem(f"links_file={str(path)!r}", str(error), "name a file that can be written")]
    return []
