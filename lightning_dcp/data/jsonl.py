"""JSON Lines: one sample a line. Lines are checked once when listed, and read again when used."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from lightning_dcp.data.tokenizer import utf8
from lightning_dcp.errors import DataError

BYTE_ORDER_MARK = b"\xef\xbb\xbf"

T = TypeVar("T")


@dataclass(frozen=True)
class JsonLine:
    """Where one sample of a JSON Lines file lies.

    Attributes:
        number: line number, from 1.
        offset: first byte of the line in the file.
        num_bytes: bytes of the line.
    """

    number: int
    offset: int
    num_bytes: int


def scan_json_lines(path: Path, read: Callable[[bytes], T]) -> tuple[list[tuple[JsonLine, T]], list[str]]:
    """Every sample of a JSON Lines file with what ``read`` makes of its line, and one complaint a bad line.

    Blank lines are no samples; a line is bad if ``read`` raises :class:`DataError`.

    Raises:
        OSError: the file cannot be read.
    """
    lines, complaints = [], []
    for number, offset, raw in _raw_lines(path):
        try:
            found = read(raw)
        except DataError as error:
            complaints.append(f"{path}:{number}: {error}")
        else:
            lines.append((JsonLine(number, offset, len(raw)), found))
    if not lines and not complaints:
        complaints.append(f"{path}: holds no samples (no line that is not blank)")
    return lines, complaints


def read_json_line(path: Path, line: JsonLine) -> bytes:
    """The bytes of one line that :func:`scan_json_lines` found."""
    with path.open("rb") as file:
        file.seek(line.offset)
        return file.read(line.num_bytes)


def json_object(raw: bytes) -> dict[str, Any]:
    """The JSON object in one line.

    Raises:
        DataError: anything else.
    """
    try:
        sample = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"not valid JSON ({error})") from error
    if not isinstance(sample, dict):
        raise DataError(f"not a JSON object but a {type(sample).__name__}")
    return sample


def text_of_line(raw: bytes, *, text_field: str) -> bytes:
    """The text in one line, as UTF-8.

    Raises:
        DataError: not a JSON object, or no text in its ``text_field``.
    """
    sample = json_object(raw)
    if text_field not in sample:
        raise DataError(f"no field {text_field!r}; the fields are {sorted(sample)}")
    text = sample[text_field]
    if not isinstance(text, str):
        raise DataError(f"field {text_field!r} holds a {type(text).__name__}, not a string")
    if not text:
        raise DataError(f"field {text_field!r} is empty")
    return utf8(text)


def _raw_lines(path: Path) -> Iterator[tuple[int, int, bytes]]:
    """Number, offset and bytes of each line that is not blank."""
    offset = 0
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            start, content = offset, raw
            offset += len(raw)
            if number == 1 and raw.startswith(BYTE_ORDER_MARK):
                start, content = len(BYTE_ORDER_MARK), raw[len(BYTE_ORDER_MARK) :]
            if content.strip():
                yield number, start, content
