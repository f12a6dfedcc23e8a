"""Segments: the parts that a sample is made of, such as the turns of a chat, and how dense their tokens are."""

from __future__ import annotations

import math
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
    segments = tuple(_segment(value, sample) for value in values)
    problems, last = [], 0
    for segment in segments:
        if not last <= segment.start < segment.end <= length:
            problems.append(f"{segment} must hold tokens, begin at {last} or later and end at {length} or before")
        if not (math.isfinite(segment.density) and segment.density > 0):
            problems.append(f"{segment}: a density is a finite number above 0")
        last = max(last, segment.end)
    if problems:
        raise BatchError(f"segments of sample {sample} of {length} tokens: {'; '.join(problems)}")
    return segments


def _segment(value: Any, sample: object) -> Segment:
    try:
        if isinstance(value, Segment):
            return value
        found = Segment(**value) if isinstance(value, Mapping) else Segment(*value)
        return Segment(int(found.start), int(found.end), str(found.kind), float(found.density))
    except (TypeError, ValueError) as error:
        raise BatchError(
            f"sample {sample}: {value!r} is no segment ({error}): give (start, end, kind, density) or a mapping with these names"
        ) from error


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
