"""Pieces in a line, cheap tokens first: what a stretch of it costs, and where it can be cut without cutting a segment."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence

from lightning_dcp.boundaries.pieces import Piece, Work


class Line:
    """Pieces one behind the other; a place in it is a number of tokens from its start.

    Pieces that follow each other in a sample stay together. Stretches of them are ordered by work a token, so that tokens
    near the line's end cost most, as late tokens of long samples do.

    Args:
        pieces: in the pack's order.
        work: the measure.
        strict: order single pieces, even if that takes neighbours apart.
    """

    def __init__(self, pieces: Sequence[Piece], work: Work, *, strict: bool = False) -> None:
        self._work = work
        stretches = [[piece] for piece in pieces] if strict else _stretches(pieces)
        self.pieces = [piece for stretch in sorted(stretches, key=self._dearness) for piece in stretch]
        self.starts, self._before = [0], [0.0]
        for piece in self.pieces:
            self.starts.append(self.starts[-1] + piece.num_tokens)
            self._before.append(self._before[-1] + work.of_piece(piece))

    def _dearness(self, stretch: Sequence[Piece]) -> tuple[float, Piece]:
        tokens = stretch[-1].end - stretch[0].start
        return math.fsum([self._work.of_piece(piece) for piece in stretch]) / tokens, stretch[0]

    @property
    def tokens(self) -> int:
        """Tokens of all pieces."""
        return self.starts[-1]

    def before(self, place: int) -> float:
        """Work of the tokens before a place."""
        number = bisect_right(self.starts, place) - 1
        if number >= len(self.pieces):
            return self._before[-1]
        piece, into = self.pieces[number], place - self.starts[number]
        return self._before[number] + self._work.seconds(piece.start, piece.start + into, piece.density)

    def reached(self, seconds: float) -> int:
        """The last place before which there is no more work than this."""
        number = min(max(bisect_right(self._before, seconds) - 1, 0), len(self.pieces))
        if number == len(self.pieces):
            return self.tokens
        piece, left = self.pieces[number], seconds - self._before[number]
        slope = self._work.linear * piece.density + 2.0 * self._work.attention * piece.start
        root = slope + math.sqrt(slope * slope + 4.0 * self._work.attention * max(left, 0.0))
        into = int(2.0 * left / root) if left > 0.0 else 0  # of attention x^2 + slope x = left
        return self.starts[number] + min(into, piece.num_tokens)

    def borders(self, place: int) -> tuple[int, ...]:
        """The borders of pieces beside a place; only itself, if it is one."""
        number = bisect_right(self.starts, place) - 1
        if self.starts[number] == place:
            return (place,)
        return self.starts[number], self.starts[number + 1]

    def is_border(self, place: int) -> bool:
        """Whether a cut here leaves all pieces whole."""
        return self.starts[bisect_right(self.starts, place) - 1] == place

    def parts(self, start: int, end: int) -> list[Piece]:
        """The pieces between two places, cut there."""
        found = []
        number = bisect_right(self.starts, start) - 1
        while start < end:
            piece, offset = self.pieces[number], self.starts[number]
            until = min(end, self.starts[number + 1])
            found.append(piece._replace(start=piece.start + start - offset, end=piece.start + until - offset))
            start, number = until, number + 1
        return found


def _stretches(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """Runs of pieces that touch."""
    stretches: list[list[Piece]] = []
    for piece in pieces:
        last = stretches[-1][-1] if stretches else None
        if last is not None and (last.sample, last.end) == (piece.sample, piece.start):
            stretches[-1].append(piece)
        else:
            stretches.append([piece])
    return stretches
