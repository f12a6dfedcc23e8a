"""Documents, and where they come from: Python's own standard library, text files and JSON Lines."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

from lightning_dcp.data.files import FoundFiles, reason, search, walk
from lightning_dcp.data.jsonl import JsonLine, read_json_line, scan_json_lines, text_of_line
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


D = TypeVar("D", bound=Document)


def python_library_documents() -> list[Document]:
    """The ``.py`` files of the running Python's standard library, one document a file, sorted by relative path.

    Its tests are included where Python ships them; installed packages are not. Lengths go from a few dozen bytes
    to several hundred thousand. Empty files (some ``__init__.py``) are left out, since an empty sample is an error
    elsewhere. Files are read as bytes, so those that are not valid UTF-8 lose nothing.

    Raises:
        DataError: files that cannot be read, or a Python that comes without its sources.
    """
    found = walk(Path(sysconfig.get_paths()["stdlib"]), suffixes=(".py",), without=NOT_STANDARD_LIBRARY)
    documents = [document for document in gather(found, _file_document) if document.size]
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

    def documents_of(path: Path, name: str) -> tuple[list[Document], list[str]]:
        if path.suffix.lower() == ".jsonl":
            return _line_documents(path, name, text_field)
        documents, complaints = _file_document(path, name)
        return documents, [*complaints, *(f"{path}: is empty" for document in documents if not document.size)]

    found = search(path_or_glob, suffixes=suffixes)
    documents = gather(found, documents_of)
    if not documents:
        raise DataError(f"no text found: searched {found.searched}")
    return documents


def gather(found: FoundFiles, documents_of: Callable[[Path, str], tuple[list[D], list[str]]]) -> list[D]:
    """The documents of all files that were found, in order.

    Args:
        found: the files.
        documents_of: from a file's path and name to its documents and complaints, one a bad line.

    Raises:
        DataError: all complaints, those of the search too.
    """
    documents, problems = [], list(found.problems)
    for path in found.paths:
        try:
            listed, complaints = documents_of(path, found.name(path))
        except OSError as error:
            listed, complaints = [], [reason(error)]
        documents += listed
        problems += complaints
    _raise_all(problems)
    return documents


def _file_document(path: Path, name: str) -> tuple[list[Document], list[str]]:
    """The document of one file."""
    with path.open("rb") as file:  # opened, so that a missing permission shows now rather than mid-epoch
        size = os.fstat(file.fileno()).st_size
    return [Document(name, size, path.read_bytes)], []


def _line_documents(path: Path, name: str, text_field: str) -> tuple[list[Document], list[str]]:
    """The documents of one JSON Lines file, one a line, and complaints."""
    lines, complaints = scan_json_lines(path, lambda raw: len(text_of_line(raw, text_field=text_field)))
    documents = [
        Document(f"{name}:{line.number}", size, partial(_read_text, path, line, text_field)) for line, size in lines
    ]
    return documents, complaints


def _read_text(path: Path, line: JsonLine, text_field: str) -> bytes:
    return text_of_line(read_json_line(path, line), text_field=text_field)


def _raise_all(problems: Sequence[str]) -> None:
    """One error for all bad files and lines."""
    if not problems:
        return
    lines = [f"{len(problems)} file(s) or line(s) cannot be used:", *(f"  {p}" for p in problems[:MAX_LISTED])]
    if len(problems) > MAX_LISTED:
        lines.append(f"  and {len(problems) - MAX_LISTED} more")
    raise DataError("\n".join(lines))
