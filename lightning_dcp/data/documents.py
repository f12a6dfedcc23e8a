"""Documents, and where they come from: Python's own standard library, text files and JSON Lines."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from lightning_dcp.data.files import reason, search, walk
from lightning_dcp.data.jsonl import read_json_line, scan_json_lines
from lightning_dcp.errors import DataError

TEXT_SUFFIXES = (".txt", ".md", ".rst", ".jsonl")
"""What :func:`text_documents` takes from a folder unless told otherwise."""

MAX_LISTED = 20
"""Bad files or lines an error lists before it says how many more there are."""

NOT_STANDARD_LIBRARY = ("site-packages", "dist-packages", "__pycache__")


@dataclass(frozen=True)
class Document:
    """One text: its name and how to get it. Nothing is read before :meth:`read`; equality is by name and size.

    Attributes:
        id: name within its source, e.g. ``json/decoder.py`` or ``chats.jsonl:12``; it decides the split.
        size: bytes of the text.
        load: returns the text as bytes; picklable, for data-loader workers that are spawned.
    """

    id: str
    size: int
    load: Callable[[], bytes] = field(compare=False)

    def read(self) -> bytes:
        """The text as bytes.

        Raises:
            DataError: it cannot be read any more, or has another size than when it was listed.
        """
        try:
            text = self.load()
        except (OSError, DataError) as error:
            raise DataError(f"document {self.id!r} cannot be read any more: {error}") from error
        if len(text) != self.size:  # plans are made from the sizes listed
            raise DataError(f"document {self.id!r} had {self.size} bytes when listed and now has {len(text)}")
        return text


def python_library_documents() -> list[Document]:
    """The ``.py`` files of the running Python's standard library, one document a file, sorted by relative path.

    Its tests are included where Python ships them; installed packages are not. Lengths go from a few dozen bytes
    to several hundred thousand. Empty files (some ``__init__.py``) are left out, since an empty sample is an error
    elsewhere. Files are read as bytes, so those that are not valid UTF-8 lose nothing.

    Raises:
        DataError: files that cannot be read, or a Python that comes without its sources.
    """
    found = walk(Path(sysconfig.get_paths()["stdlib"]), suffixes=(".py",), without=NOT_STANDARD_LIBRARY)
    documents, problems = [], list(found.problems)
    for path in found.paths:
        files, complaints = _file_document(path, name=found.name(path))
        documents += files
        problems += complaints
    _raise_all(problems)
    documents = [document for document in documents if document.size]
    if not documents:
        raise DataError(f"this Python comes without the sources of its standard library: searched {found.searched}")
    return documents


def text_documents(
    path_or_glob: str | os.PathLike[str], *, text_field: str = "text", suffixes: Sequence[str] = TEXT_SUFFIXES
) -> list[Document]:
    """Text files, one document a file, or one a line for ``.jsonl`` files; sorted by relative path, then line.

    Args:
        path_or_glob: a folder (searched recursively), one file, or a glob pattern (``**`` for any depth).
        text_field: where a ``.jsonl`` line holds its text. Blank lines are skipped.
        suffixes: what to take from a folder; a file or a pattern is taken as it is named.

    Raises:
        DataError: nothing matched; or files or lines that are empty or cannot be read, all of them in one error.
    """
    found = search(path_or_glob, suffixes=suffixes)
    documents, problems = [], list(found.problems)
    for path in found.paths:
        if path.suffix.lower() == ".jsonl":
            samples, complaints = _line_documents(path, name=found.name(path), text_field=text_field)
        else:
            samples, complaints = _file_document(path, name=found.name(path))
            complaints += [f"{path}: is empty" for sample in samples if not sample.size]
        documents += samples
        problems += complaints
    _raise_all(problems)
    if not documents:
        raise DataError(f"no text found: searched {found.searched}")
    return documents


def _file_document(path: Path, *, name: str) -> tuple[list[Document], list[str]]:
    """The document of one file, or a complaint."""
    try:
        with path.open("rb") as file:  # opened, so that a missing permission shows now rather than mid-epoch
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        return [], [reason(error)]
    return [Document(name, size, path.read_bytes)], []


def _line_documents(path: Path, *, name: str, text_field: str) -> tuple[list[Document], list[str]]:
    """The documents of one JSON Lines file, one a line, and complaints."""
    try:
        lines, complaints = scan_json_lines(path, text_field=text_field)
    except OSError as error:
        return [], [reason(error)]
    documents = [
        Document(f"{name}:{line.number}", line.text_size, partial(read_json_line, path, line, text_field))
        for line in lines
    ]
    return documents, complaints


def _raise_all(problems: Sequence[str]) -> None:
    """One error for all bad files and lines."""
    if not problems:
        return
    lines = [f"{len(problems)} file(s) or line(s) cannot be used:", *(f"  {p}" for p in problems[:MAX_LISTED])]
    if len(problems) > MAX_LISTED:
        lines.append(f"  and {len(problems) - MAX_LISTED} more")
    raise DataError("\n".join(lines))
