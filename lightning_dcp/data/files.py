"""Finding files: a folder with all below it, one file, or a glob pattern."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_dcp.errors import DataError


@dataclass(frozen=True)
class FoundFiles:
    """Files of one search.

    Attributes:
        root: the folder names are relative to.
        paths: the files, sorted by name.
        problems: one line for each folder that could not be listed.
        searched: what was searched, in words.
    """

    root: Path
    paths: tuple[Path, ...]
    problems: tuple[str, ...]
    searched: str

    def name(self, path: Path) -> str:
        """Name of a file: its path below ``root``, the same on every machine."""
        return path.relative_to(self.root).as_posix()


def search(path_or_glob: str | os.PathLike[str], *, suffixes: Sequence[str]) -> FoundFiles:
    """What a folder, a file or a glob pattern stands for; the suffixes only choose within a folder.

    Raises:
        DataError: a path that does not exist and is no pattern.
    """
    named = os.path.expanduser(os.fspath(path_or_glob))
    path = Path(named)
    if path.is_dir():
        return walk(path, suffixes=suffixes)
    if path.exists():
        return FoundFiles(path.parent, (path,), (), f"the file {named}")
    if not glob.has_magic(named):
        raise DataError(f"{named} does not exist: name a folder, a file, or a glob pattern")
    fixed = next(i for i, part in enumerate(path.parts) if glob.has_magic(part))
    matches = {Path(match) for match in glob.glob(named, recursive=True)}
    return _found(Path(*path.parts[:fixed]), matches, [], f"files that match the pattern {named}")


def walk(root: Path, *, suffixes: Sequence[str], without: Sequence[str] = ()) -> FoundFiles:
    """Files below a folder by suffix (in either case), leaving out subfolders of some names."""
    paths: list[Path] = []
    problems: list[str] = []
    wanted = tuple(suffix.lower() for suffix in suffixes)
    for folder, subfolders, names in os.walk(root, onerror=lambda error: problems.append(reason(error))):
        subfolders[:] = [name for name in subfolders if name not in without]
        paths += [Path(folder, name) for name in names if name.lower().endswith(wanted)]
    return _found(
        root, paths, problems, f"the folder {root} and all below it for files ending in {', '.join(suffixes)}"
    )


def reason(error: OSError) -> str:
    """An operating-system error in one line that starts with the file's name."""
    return f"{error.filename}: {error.strerror or error}"


def _found(root: Path, paths: Iterable[Path], problems: Sequence[str], searched: str) -> FoundFiles:
    files = filter(_is_file, paths)
    return FoundFiles(
        root, tuple(sorted(files, key=lambda p: p.relative_to(root).as_posix())), tuple(problems), searched
    )


def _is_file(path: Path) -> bool:
    """Regular files and broken links (to be complained about when read); not folders, sockets or pipes."""
    return path.is_file() or (path.is_symlink() and not path.exists())
