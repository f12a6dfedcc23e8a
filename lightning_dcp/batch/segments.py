"""Segments of the samples of a batch: read, checked against lengths, and part of its checksum."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

from lightning_dcp.errors import BatchError
from lightning_dcp.segments import SampleSegments, Segment, as_segments, cut, is_number

__all__ = [
    "SEGMENTS",
    "BatchSegments",
    "SampleSegments",
    "Segment",
    "as_batch_segments",
    "cut",
    "is_number",
    "segments_checksum",
]

SEGMENTS = "segments"
"""The key of a sample, and of a batch that is a mapping, that holds segments."""

BatchSegments: TypeAlias = tuple[SampleSegments, ...]
"""The segments of each sample of a batch."""


def as_batch_segments(values: Any, lengths: Sequence[int], sample_ids: Sequence[Any]) -> BatchSegments | None:
    """The segments of each sample of a batch; ``None`` if it has none.

    Args:
        values: one entry a sample: its segments, or ``None`` for none.
        lengths: tokens of each sample.
        sample_ids: the samples' names, for messages.

    Raises:
        BatchError: no list of one entry a sample; or everything that is wrong with the segments of all samples, at once.
    """
    if values is None:
        return None
    if not isinstance(values, list | tuple) or len(values) != len(lengths):
        many = f" of {len(values)}" if isinstance(values, list | tuple) else ""
        raise BatchError(
            f"{SEGMENTS} of a batch of {len(lengths)} sample(s) are a {type(values).__name__}{many}: give a list with the "
            "segments of each sample, or name a field of another meaning differently"
        )
    found, problems = [], []
    for value, length, name in zip(values, lengths, sample_ids, strict=True):
        try:
            found.append(as_segments(_several(value, name), length, sample=name))
        except BatchError as error:
            problems.append(str(error))
    if problems:
        raise BatchError("\n".join(problems))
    return tuple(found)


def _several(value: Any, name: object) -> Iterable[Any]:
    if value is None:
        return ()
    if isinstance(value, list | tuple) and not isinstance(value, Segment):
        return value
    raise BatchError(f"segments of sample {name} are a {type(value).__name__}: give a list of segments")


def segments_checksum(segments: BatchSegments | None, checksum: int) -> int:
    """A running CRC-32 with these segments added; as it was if there are none."""
    return (
        checksum if segments is None else zlib.crc32(repr([list(map(tuple, s)) for s in segments]).encode(), checksum)
    )
