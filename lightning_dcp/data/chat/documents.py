"""Chats as documents, whose lengths in tokens are found when they are listed, and as samples of a data set."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_dcp.data.chat.messages import read_chat
from lightning_dcp.data.chat.pieces import ChatEncoder, ChatRules, ChatSample
from lightning_dcp.data.dataset import DocumentDataset
from lightning_dcp.data.documents import Document, gather
from lightning_dcp.data.files import search
from lightning_dcp.data.jsonl import read_json_line, scan_json_lines
from lightning_dcp.errors import DataError

SUFFIXES = (".jsonl",)
"""What is taken from a folder unless told otherwise."""

NAMED = 5
"""Chats that a warning names."""


@dataclass(frozen=True)
class ChatDocument(Document):
    """One chat, as a line of JSON.

    Attributes:
        tokens: of its sample.
        has_target: whether one of these is a target.
    """

    tokens: int
    has_target: bool


@dataclass(frozen=True)
class ChatReader:
    """Makes samples of lines of JSON.

    Attributes:
        encoder: makes tokens of chats.
        rules: make a sample of these.
    """

    encoder: ChatEncoder
    rules: ChatRules

    def measure(self, raw: bytes) -> tuple[int, bool]:
        """Tokens of a line's sample, and whether one of them is a target.

        Raises:
            DataError: a line that is no chat, or one that cannot be written as tokens.
        """
        pieces = self.encoder.encode(read_chat(raw))
        return self.rules.length(pieces), self.rules.has_target(pieces)

    def sample(self, document: ChatDocument, index: int) -> ChatSample:
        """The sample of a document.

        Raises:
            DataError: the line cannot be read any more, or has changed.
        """
        sample = self.rules.sample(self.encoder.encode(read_chat(document.read())), index)
        if len(sample["input_ids"]) != document.tokens:  # plans are made from the lengths listed
            now = len(sample["input_ids"])
            raise DataError(f"chat {document.id!r} had {document.tokens} tokens when listed and now has {now}")
        return sample


def chat_documents(
    path_or_glob: str | os.PathLike[str], reader: ChatReader, *, suffixes: Sequence[str] = SUFFIXES
) -> list[ChatDocument]:
    """The chats of JSON Lines files, sorted by relative path, then line; blank lines are skipped.

    Args:
        path_or_glob: a folder (searched recursively), one file, or a glob pattern (``**`` for any depth).
        reader: makes samples of lines.
        suffixes: what to take from a folder; a file or a pattern is taken as it is named.

    Raises:
        DataError: nothing matched; or lines that are no chats, all of them in one error.
    """

    def documents_of(path: Path, name: str) -> tuple[list[ChatDocument], list[str]]:
        lines, complaints = scan_json_lines(path, reader.measure)
        documents = [
            ChatDocument(f"{name}:{line.number}", line.num_bytes, partial(read_json_line, path, line), *measured)
            for line, measured in lines
        ]
        return documents, complaints

    found = search(path_or_glob, suffixes=suffixes)
    documents = gather(found, documents_of)
    if not documents:
        raise DataError(f"no chats found: searched {found.searched}")
    return documents


def with_targets(documents: Sequence[ChatDocument], rules: ChatRules) -> list[ChatDocument]:
    """The documents that have a target; one warning counts the others.

    Raises:
        DataError: none has one.
    """
    kept = [document for document in documents if document.has_target]
    left_out = [document.id for document in documents if not document.has_target]
    if not left_out:
        return kept
    among = f"within max_length={rules.max_length} tokens, with loss_on={sorted(rules.loss_on)}"
    if not kept:
        raise DataError(f"none of {len(documents)} chat(s) has a token to learn from {among}: change one of the two")
    names = ", ".join(left_out[:NAMED]) + (", ..." if len(left_out) > NAMED else "")
    rank_zero_warn(
        f"{len(left_out)} of {len(documents)} chats have no token to learn from {among}, and are left out: {names}"
    )
    return kept


class ChatDataset(DocumentDataset):
    """Chats as token sequences with labels and segments; each is read and tokenised when asked for.

    Args:
        documents: the chats, in order.
        reader: makes samples of them.
    """

    documents: tuple[ChatDocument, ...]

    def __init__(self, documents: Sequence[ChatDocument], reader: ChatReader) -> None:
        super().__init__(documents, max_length=reader.rules.max_length)
        self.reader = reader

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sample, as found when the chats were listed: nothing is read."""
        return tuple(document.tokens for document in self.documents)

    def sample(self, index: int) -> ChatSample:
        """The tokens, labels and segments of one chat."""
        return self.reader.sample(self.documents[index], index)
