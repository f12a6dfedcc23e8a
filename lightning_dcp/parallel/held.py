"""The parts of segments that the ranks of a layout hold."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter

from lightning_dcp.parallel.layout import PackLayout
from lightning_dcp.segments import SampleSegments, Segment


def held_segments(layout: PackLayout, place: int, segments: Sequence[SampleSegments]) -> Iterator[Segment]:
    """The parts of segments that a rank of a group holds; found by their ends, since samples may have thousands."""
    for chunk in layout.ranks[place]:
        own = segments[chunk.sample]
        number = bisect_right(own, chunk.start, key=attrgetter("end"))
        while number < len(own) and own[number].start < chunk.end:
            segment = own[number]
            yield segment._replace(start=max(segment.start, chunk.start), end=min(segment.end, chunk.end))
            number += 1


def extra_tokens(segments: Iterable[Segment]) -> float:
    """How many tokens of density 1 segments count for beyond their own number; below 0 where they are less dense."""
    return math.fsum([(segment.density - 1) * segment.num_tokens for segment in segments])
