"""The rest of a pack's tokens fills the shards: each takes cheap ones and dear ones, as many as make it even."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from lightning_dcp.boundaries.line import Line
from lightning_dcp.boundaries.pieces import Piece, Work
from lightning_dcp.boundaries.shards import Shards


@dataclass(frozen=True)
class _Rest:
    """What no rank has taken yet: the places ``front .. back - 1`` of the line."""

    line: Line
    front: int
    back: int

    @property
    def tokens(self) -> int:
        return self.back - self.front

    @cached_property
    def ends_s(self) -> tuple[float, float]:
        """Work of all tokens before its front, and before its back."""
        return self.line.before(self.front), self.line.before(self.back)

    @property
    def work_s(self) -> float:
        return self.ends_s[1] - self.ends_s[0]

    def taken_s(self, cheap: int, dear: int) -> float:
        """Work of so many tokens from the front and so many from the back."""
        front_s, back_s = self.ends_s
        return self.line.before(self.front + cheap) - front_s + back_s - self.line.before(self.back - dear)


@dataclass(frozen=True)
class _Need:
    """What one rank is to take, and what keeps the ranks after it from what they need.

    Attributes:
        seconds: of work.
        tokens: as many as suit its work.
        least: fewest tokens, or the others have no room for the rest.
        most: most tokens that it has room for.
        most_s: most work.
        least_s: least work, or the others get too much.
    """

    seconds: float
    tokens: int
    least: int
    most: int
    most_s: float
    least_s: float


def fill(
    shards: Shards, pieces: Sequence[Piece], rooms: Sequence[int], slack_s: float, work: Work, *, strict: bool = False
) -> None:
    """Share pieces out so that all shards have about the same work, however unlike they are before.

    The pieces form a line, cheap tokens first. A rank takes some from its front and some from its back, so that it gets both
    the tokens and the work that it needs; zigzag is what comes of it where all ranks need the same. Both cuts are put on
    borders of segments where the work stays within ``slack_s`` of even.

    Args:
        shards: is filled.
        pieces: to share out, in the pack's order.
        rooms: most tokens that each rank may take; enough for all together.
        slack_s: how far from even a shard may be to leave a segment whole.
        work: the measure.
        strict: order the line by single pieces, which makes shards more even and their chunks more.
    """
    line = Line(pieces, work, strict=strict)
    rest = _Rest(line, 0, line.tokens)
    even = level(shards.work_s, rest.work_s)
    wanted = [max(0.0, even - seconds) for seconds in shards.work_s]
    tokens = token_shares(wanted, rooms, line.tokens)
    mean = rest.work_s / line.tokens if line.tokens else 0.0
    order = sorted(range(shards.size), key=lambda r: (-abs(wanted[r] / tokens[r] - mean) if tokens[r] else 0.0, r))
    for number, rank in enumerate(order):
        after = order[number + 1 :]
        if after:
            need = _need(shards, rest, rank, after, wanted, tokens, rooms, even + slack_s)
            cheap, dear = _choose(rest, need)
        else:
            cheap, dear = rest.tokens, 0
        taken = line.parts(rest.front, rest.front + cheap) + line.parts(rest.back - dear, rest.back)
        shards.add(rank, taken, work)
        rest = _Rest(line, rest.front + cheap, rest.back - dear)


def level(loads: Sequence[float], more: float) -> float:
    """The level to which the lowest loads rise when ``more`` is added to them."""
    rising = sorted(loads)
    total = more
    for number, load in enumerate(rising, 1):
        total += load
        if number == len(rising) or total / number <= rising[number]:
            return total / number
    return 0.0


def token_shares(wanted: Sequence[float], rooms: Sequence[int], tokens: int) -> list[int]:
    """Tokens of each rank, in proportion to the work it needs as far as it has room."""
    shares, left = [0] * len(rooms), tokens
    ranks = [rank for rank, room in enumerate(rooms) if room > 0]
    while left and ranks:
        weights = {rank: wanted[rank] for rank in ranks}
        if not math.fsum(weights.values()) > 0.0:
            weights = {rank: float(rooms[rank]) for rank in ranks}
        total = math.fsum(weights.values())
        full = [rank for rank in ranks if left * (weights[rank] / total) >= rooms[rank]]
        for rank in full or ranks:
            shares[rank] = rooms[rank] if full else int(left * (weights[rank] / total))
        if not full:
            break
        left -= sum([rooms[rank] for rank in full])
        ranks = [rank for rank in ranks if rank not in full]
    missing = tokens - sum(shares)  # by rounding down
    for rank, room in enumerate(rooms):
        more = min(room - shares[rank], -(-missing // (len(rooms) - rank)))
        shares[rank] += more
        missing -= more
    for rank, room in enumerate(rooms):
        more = min(room - shares[rank], missing)
        shares[rank] += more
        missing -= more
    return shares


def _need(
    shards: Shards,
    rest: _Rest,
    rank: int,
    after: Sequence[int],
    wanted: Sequence[float],
    tokens: Sequence[int],
    rooms: Sequence[int],
    most_s: float,
) -> _Need:
    """A rank's own need, and its part of what the ranks before it took more or less than theirs."""
    count = len(after) + 1
    work_s = rest.work_s
    seconds = wanted[rank] + (work_s - wanted[rank] - math.fsum([wanted[r] for r in after])) / count
    least, most = max(0, rest.tokens - sum([rooms[r] for r in after])), min(rooms[rank], rest.tokens)
    own = tokens[rank] + (rest.tokens - tokens[rank] - sum([tokens[r] for r in after])) // count
    others = math.fsum([shards.work_s[r] for r in after])
    # the others' mean may rise by half of what one rank may be over, which leaves the last ones room to cut at borders
    even = shards.work_s[rank] + wanted[rank]
    least_s = others + work_s - len(after) * (even + most_s) / 2.0
    return _Need(max(0.0, seconds), min(max(own, least), most), least, most, most_s - shards.work_s[rank], least_s)


def _choose(rest: _Rest, need: _Need) -> tuple[int, int]:
    """Tokens from the front and from the back: in few runs and with few segments cut, then as even as can be."""
    line = rest.line
    cheap = _first(need.tokens, lambda x: rest.taken_s(x, need.tokens - x) <= need.seconds)
    best, score = (cheap, need.tokens - cheap), (9, 9, 0.0)
    for x, y in {best: 0, **dict.fromkeys(_candidates(rest, need, *best), 0)}:
        if not (x >= 0 and y >= 0 and need.least <= x + y <= need.most):
            continue
        seconds = rest.taken_s(x, y)
        if not need.least_s <= seconds <= need.most_s:
            continue
        meet = x + y == rest.tokens
        cut = (not line.is_border(rest.front + x)) + (not meet and not line.is_border(rest.back - y))
        runs = (x > 0) + (y > 0 and not meet)
        found = (cut + runs, cut, abs(seconds - need.seconds))
        if found < score:
            best, score = (x, y), found
    return best


def _candidates(rest: _Rest, need: _Need, cheap: int, dear: int) -> Iterator[tuple[int, int]]:
    """Ways to take what a rank needs, with one cut or both at a border, or from one end only."""
    line, front, back = rest.line, rest.front, rest.back
    front_s, back_s = rest.ends_s
    fronts = [place - front for place in line.borders(front + cheap)]
    backs = [back - place for place in line.borders(back - dear)]
    yield from ((x, y) for x in fronts for y in backs)
    for x in fronts:
        yield x, need.tokens - x
        yield x, back - line.reached(back_s - (need.seconds - rest.taken_s(x, 0)))
    for y in backs:
        yield need.tokens - y, y
        yield line.reached(front_s + need.seconds - rest.taken_s(0, y)) - front, y
    ends = line.reached(front_s + need.seconds), line.reached(back_s - need.seconds)
    for place in (ends[0], *line.borders(ends[0])):
        yield place - front, 0
    for place in (ends[1], *line.borders(ends[1])):
        yield 0, back - place


def _first(high: int, holds: Callable[[int], bool]) -> int:
    """The smallest number of 0 .. ``high`` for which a test holds that holds for all larger ones; ``high`` if none."""
    low = 0
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return low
