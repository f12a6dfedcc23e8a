"""Tokens of a chat in pieces, and the sample that is made of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any, Protocol, TypedDict

import torch
from torch import Tensor

from lightning_dcp.batch.segments import Segment, cut
from lightning_dcp.batch.sequences import IGNORE_INDEX
from lightning_dcp.data.chat.messages import Chat


@dataclass(frozen=True)
class Piece:
    """Neighbouring tokens of a chat that are alike.

    Attributes:
        ids: token ids; bytes are their own.
        turn: number of the message that they belong to.
        kind: kind of their segment.
        density: given for them in the data; ``None``: that of their kind.
        learn: whether they may be targets: not the header of a turn, which is given when a model is asked to answer.
    """

    ids: Sequence[int]
    turn: int
    kind: str
    density: float | None
    learn: bool

    def like(self, other: Piece) -> bool:
        """Whether both belong to one segment."""
        return (self.turn, self.kind, self.density) == (other.turn, other.kind, other.density)


class ChatEncoder(Protocol):
    """Makes tokens of chats."""

    tokenizer: Any

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""

    def encode(self, chat: Chat) -> list[Piece]:
        """All tokens of a chat, in order.

        Raises:
            DataError: a chat that cannot be written as tokens, or whose turns cannot be told apart in them.
        """


class ChatSample(TypedDict):
    """One chat as a sample.

    Attributes:
        input_ids: token ids, int64 ``[L]``.
        labels: the same at the same positions where a token is a target, -100 elsewhere, ``[L]``.
        segments: the turns, and parts of turns: all tokens belong to one.
        index: the sample's index in its data set, which names it in plans and errors.
    """

    input_ids: Tensor
    labels: Tensor
    segments: list[Segment]
    index: int


@dataclass(frozen=True)
class ChatRules:
    """What is made of the pieces of a chat.

    Attributes:
        max_length: tokens that a sample is cut at, at its end.
        loss_on: kinds whose tokens are targets.
        densities: density of a kind's tokens; 1.0 for kinds that are not named.
    """

    max_length: int
    loss_on: Collection[str]
    densities: Mapping[str, float]

    def length(self, pieces: Sequence[Piece]) -> int:
        """Tokens of the sample."""
        return min(sum(len(piece.ids) for piece in pieces), self.max_length)

    def has_target(self, pieces: Sequence[Piece]) -> bool:
        """Whether a token of the sample is a target. Its first one never is, as nothing comes before it."""
        ends = list(accumulate(len(piece.ids) for piece in pieces))
        spans = zip(pieces, (end - len(piece.ids) for piece, end in zip(pieces, ends, strict=True)), ends, strict=True)
        return any(self._learns(p) and max(start, 1) < min(end, self.max_length) for p, start, end in spans)

    def sample(self, pieces: Sequence[Piece], index: int) -> ChatSample:
        """The sample, cut."""
        ids = list(chain.from_iterable(piece.ids for piece in pieces))
        tokens = torch.tensor(ids[: self.max_length], dtype=torch.int64)
        flags = chain.from_iterable([self._learns(piece)] * len(piece.ids) for piece in pieces)
        learned = torch.tensor(list(flags)[: self.max_length], dtype=torch.bool)
        return {
            "input_ids": tokens,
            "labels": tokens.masked_fill(~learned, IGNORE_INDEX),
            "segments": list(cut(self.segments(pieces), 0, self.max_length)),
            "index": index,
        }

    def segments(self, pieces: Sequence[Piece]) -> list[Segment]:
        """One segment for neighbouring pieces of one turn, kind and density, before any cut."""
        found: list[Segment] = []
        before: Piece | None = None
        end = 0
        for piece in filter(lambda piece: len(piece.ids), pieces):
            start, end = end, end + len(piece.ids)
            if before is not None and piece.like(before):
                start = found.pop().start
            found.append(Segment(start, end, piece.kind, self._density(piece)))
            before = piece
        return found

    def _learns(self, piece: Piece) -> bool:
        return piece.learn and piece.kind in self.loss_on

    def _density(self, piece: Piece) -> float:
        return float(self.densities.get(piece.kind, 1.0) if piece.density is None else piece.density)
