"""Segments: the parts that a sample is made of, such as the turns of a chat, and how dense their tokens are."""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from lightning_dcp.errors import BatchError

PLAIN = "text"
"""Kind of tokens that no segment names."""


class Segment(NamedTuple):
    """Tokens ``start .. end - 1`` of one sample.

    Attributes:
        start: first token, from the sample's start.
        end: the token after the last.
        kind: what it is: ``system``, ``user``, ``assistant``, ``tool``, ``document``, or a name of the user's.
        density: how costly, or how rich in information, each of its tokens is, beside 1.0 for ordinary text.
    """

    start: int
    end: int
    kind: str = PLAIN
    density: float = 1.0

    @property
    def num_tokens(self) -> int:
        """Tokens that it holds."""
        return self.end - self.start


SampleSegments = tuple[Segment, ...]
"""The segments of one sample: ascending, none over another; tokens between them are plain text of density 1."""


def as_segments(values: Iterable[Any], length: int, *, sample: object = "") -> SampleSegments:
    """The segments of a sample, from segments, ``(start, end, kind, density)`` or mappings with these names.

    Args:
        values: what a data set or a user gave; kind and density may be left out.
        length: tokens of the sample.
        sample: its id, for messages.

    Raises:
        BatchError: everything that is wrong with them, at once.
    """
    segments: list[Segment] = []
    problems: list[str] = []
    last = 0
    for value in values:
        try:
            given = Segment(**value) if isinstance(value, Mapping) else Segment(*value)
        except TypeError as error:
            remedy = "give (start, end, kind, density) or a mapping with these names"
            problems.append(f"{value!r:.200} is no segment ({error}): {remedy}")
            continue
        segment, wrong = _checked(given, last, length)
        segments.append(segment)
        problems += wrong
        last = max(last, segment.end)
    if problems:
        text = f"segments of sample {sample} of {length} tokens: {'; '.join(problems)}"
        raise BatchError(text.encode("utf-8", "backslashreplace").decode("utf-8"))  # ids may hold anything
    return tuple(segments)


def _checked(given: Segment, last: int, length: int) -> tuple[Segment, list[str]]:
    """A segment of plain values, whatever number and text types were given, and what is wrong with it."""
    start, end, kind, density = _whole(given.start), _whole(given.end), _text(given.kind), _number(given.density)
    wrong = []
    if start is None or end is None:
        wrong.append("start and end are whole numbers")
    elif not last <= start < end <= length:
        wrong.append(f"it must hold tokens, begin at {last} or later and end at {length} or before")
    if kind is None:
        wrong.append("a kind is a string that is not empty and can be written as UTF-8")
    if density is None:
        wrong.append("a density is a finite number above 0")
    return Segment(start or 0, end or 0, kind or PLAIN, density or 1.0), [f"{given!r:.200}: {what}" for what in wrong]


def _whole(value: Any) -> int | None:
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def _text(value: Any) -> str | None:
    try:
        return value.encode("utf-8").decode("utf-8") if isinstance(value, str) and value else None  # no subclass of it
    except UnicodeEncodeError:
        return None


def _number(value: Any) -> float | None:
    try:
        found = None if isinstance(value, bool | str | bytes | bytearray) else float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return found if found is not None and math.isfinite(found) and found > 0 else None


def is_number(value: object) -> bool:
    """Whether a value is a finite number that a float can hold."""
    # a comparison, since math.isfinite raises for integers beyond all floats
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def covering(segments: Sequence[Segment], length: int) -> SampleSegments:
    """Segments that hold each token of a sample once: those given, and plain ones for the tokens between them."""
    found: list[Segment] = []
    last = 0
    for segment in segments:
        if segment.start > last:
            found.append(Segment(last, segment.start))
        found.append(segment)
        last = segment.end
    return tuple([*found, Segment(last, length)] if last < length else found)


def cut(segments: Sequence[Segment], start: int, end: int) -> SampleSegments:
    """The parts of segments inside ``start .. end - 1``, at their places in the whole sample."""
    parts = (s._replace(start=max(s.start, start), end=min(s.end, end)) for s in segments)
    return tuple(part for part in parts if part.start < part.end)
