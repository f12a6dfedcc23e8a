"""Made-up chats for ``lightning-dcp bench boundaries``: unequal, with dense tool returns next to each other."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from lightning_dcp.schedule.static import next_fit
from lightning_dcp.segments import SampleSegments, Segment

SYSTEM, USER, ASSISTANT, TOOL = 150.0, 60.0, 250.0, 250.0
"""Median tokens of turns, which are log-normal."""
MOST_TURNS = 6
ASKS_TOOLS, MOST_RETURNS = 0.08, 5
"""Share of user turns after which tools are asked, and how many then answer one after the other, at most."""
LONGEST_RETURN = 1024
"""Tools cut their answers off."""


@dataclass(frozen=True)
class ChatPack:
    """The samples of one step, all on one group.

    Attributes:
        lengths: tokens of each sample.
        segments: of each sample.
    """

    lengths: tuple[int, ...]
    segments: tuple[SampleSegments, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of all samples."""
        return sum(self.lengths)


def draw_packs(count: int, capacity: int, density: float, seed: int) -> list[ChatPack]:
    """Chats in the order in which they come, in packs of at most ``capacity`` tokens.

    Args:
        count: of packs.
        capacity: tokens of a group; longer chats are cut.
        density: of tool returns.
        seed: of the draw.
    """
    random = Random(seed)
    packs: list[ChatPack] = []
    chats: list[SampleSegments] = []
    while len(packs) < count:
        chats += [draw_chat(random, capacity, density) for _ in range(256)]
        runs = next_fit([chat[-1].end for chat in chats], capacity)
        packs += [_pack(chats[run.start : run.stop]) for run in runs[:-1]]  # the last one may still grow
        chats = chats[runs[-1].start :]
    return packs[:count]


def _pack(chats: list[SampleSegments]) -> ChatPack:
    return ChatPack(tuple(chat[-1].end for chat in chats), tuple(chats))


def draw_chat(random: Random, longest: int, density: float) -> SampleSegments:
    """One chat: a system turn, then turns of user and assistant; where tools are asked, some answer one after the other.

    Args:
        random: what is drawn from.
        longest: most tokens.
        density: of tool returns.
    """
    turns = [("system", _tokens(random, SYSTEM))]
    for _ in range(random.randint(1, MOST_TURNS)):
        turns.append(("user", _tokens(random, USER)))
        if random.random() < ASKS_TOOLS:
            returns = random.randint(1, MOST_RETURNS)
            turns += [("tool", min(LONGEST_RETURN, _tokens(random, TOOL))) for _ in range(returns)]
        turns.append(("assistant", _tokens(random, ASSISTANT)))
    segments: list[Segment] = []
    start = 0
    for kind, tokens in turns:
        end = min(start + tokens, longest)
        if end > start:
            segments.append(Segment(start, end, kind, density if kind == "tool" else 1.0))
        start = end
    return tuple(segments)


def _tokens(random: Random, median: float) -> int:
    return 1 + int(median * random.lognormvariate(0.0, 0.9))
