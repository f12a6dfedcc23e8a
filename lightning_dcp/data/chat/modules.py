"""Lightning data modules over chats: one's own JSON Lines in the messages format, or made-up ones."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from lightning_dcp.data.arguments import suffix_problems, whole_number_problems
from lightning_dcp.data.chat.byte_turns import ByteTurns
from lightning_dcp.data.chat.densities import densities_of, density_problems
from lightning_dcp.data.chat.documents import (
    SUFFIXES,
    ChatDataset,
    ChatDocument,
    ChatReader,
    chat_documents,
    with_targets,
)
from lightning_dcp.data.chat.huggingface import TemplateTurns
from lightning_dcp.data.chat.made_up import made_up_line
from lightning_dcp.data.chat.messages import ASSISTANT, TOOL_CALL
from lightning_dcp.data.chat.pieces import ChatEncoder, ChatRules
from lightning_dcp.data.documents import Document
from lightning_dcp.data.modules import DocumentDataModule
from lightning_dcp.errors import Problem

BYTES = "bytes"
"""Name of the built-in byte-level tokenizer."""


class MessagesDataModule(DocumentDataModule):
    """Chats with a segment for each turn, and a loss on what the assistant says; a subclass says which chats.

    All chats are read and tokenised once when they are listed, to know their lengths and to find all that is wrong with them
    before training. A sample longer than ``max_length`` is cut at its end, with its labels and segments. Chats that are then
    left without a target are left out, with one warning that counts them.

    Args:
        tokenizer: ``bytes``, the built-in :class:`~lightning_dcp.data.ChatByteTokenizer`; or the folder of a Hugging Face
            tokenizer, whose own chat template writes the turns.
        densities: density of each kind of segment, or the path of a YAML file ``kind: density``. Kinds that are not named
            have 2.0 (``tool``), 1.5 (``tool_call``, ``document``) or 1.0; what the data says of a message or part wins.
        loss_on: kinds whose tokens are targets. Of assistant turns, their text and tool calls and the end of the turn are,
            but not the header; with a Hugging Face tokenizer, of turns of other roles the whole turn.
        **options: those of :class:`~lightning_dcp.data.DocumentDataModule`.

    Raises:
        ConfigurationError: all bad arguments at once.
    """

    def __init__(
        self,
        *,
        tokenizer: str = BYTES,
        densities: dict[str, float] | str | None = None,
        loss_on: Sequence[str] = (ASSISTANT, TOOL_CALL),
        **options: Any,
    ) -> None:
        self.tokenizer_path = tokenizer
        self.densities = densities
        self.loss_on = loss_on
        super().__init__(**options)

    def problems(self) -> list[Problem]:
        """What is wrong with the arguments."""
        found = density_problems(self.densities) + super().problems()
        kinds = self.loss_on
        if isinstance(kinds, str) or not kinds or not all(isinstance(kind, str) for kind in kinds):
            remedy = "give a list of kinds, such as ['assistant', 'tool_call']"
            found.append(Problem(f"loss_on={kinds!r}", "not a list of kinds", remedy))
        if self.tokenizer_path != BYTES and not Path(self.tokenizer_path).expanduser().is_dir():
            remedy = f"{BYTES!r}, or a folder that tokenizer.save_pretrained wrote; nothing is downloaded"
            found.append(Problem(f"tokenizer={self.tokenizer_path!r}", "no such folder", remedy))
        return found

    @cached_property
    def encoder(self) -> ChatEncoder:
        """What makes tokens of chats."""
        return ByteTurns() if self.tokenizer_path == BYTES else TemplateTurns(self.tokenizer_path)

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer: :class:`~lightning_dcp.data.ChatByteTokenizer`, or the one of the folder."""
        return self.encoder.tokenizer

    @property
    def vocab_size(self) -> int:
        """Token ids are below this: what a model's embedding needs at least."""
        return self.encoder.vocab_size

    @cached_property
    def reader(self) -> ChatReader:
        """What makes samples of lines of JSON."""
        rules = ChatRules(self.max_length, frozenset(self.loss_on), densities_of(self.densities))
        return ChatReader(self.encoder, rules)

    def chats(self) -> list[ChatDocument]:
        """All chats there are; a subclass says which."""
        raise NotImplementedError(f"{type(self).__name__} must define chats()")

    def documents(self) -> list[ChatDocument]:
        """The chats that have a target."""
        return with_targets(self.chats(), self.reader.rules)

    def dataset(self, documents: Sequence[Document]) -> ChatDataset:
        """The data set of one side of the split."""
        return ChatDataset([d for d in documents if isinstance(d, ChatDocument)], self.reader)


class ChatDataModule(MessagesDataModule):
    """One's own chats: JSON Lines, ``{"messages": [...], "tools": [...]}``.

    Args:
        path: a folder (searched recursively), one file, or a glob pattern.
        suffixes: what to take from a folder.
        **options: those of :class:`MessagesDataModule`.
    """

    def __init__(self, path: str, *, suffixes: Sequence[str] = SUFFIXES, **options: Any) -> None:
        self.path = path
        self.suffixes = tuple(suffixes)
        super().__init__(**options)

    def problems(self) -> list[Problem]:
        """What is wrong with the arguments."""
        return suffix_problems(self.suffixes) + super().problems()

    def chats(self) -> list[ChatDocument]:
        """The lines found at ``path``."""
        return chat_documents(self.path, self.reader, suffixes=self.suffixes)


class MadeUpChatDataModule(MessagesDataModule):
    """Made-up chats of very unequal lengths, with long returns of tools next to each other; nothing to download.

    Args:
        num_chats: how many there are.
        text_seed: another one gives other chats.
        **options: those of :class:`MessagesDataModule`.
    """

    def __init__(self, num_chats: int = 400, *, text_seed: int = 0, **options: Any) -> None:
        self.num_chats = num_chats
        self.text_seed = text_seed
        super().__init__(**options)

    def problems(self) -> list[Problem]:
        """What is wrong with the arguments."""
        return whole_number_problems("num_chats", self.num_chats, at_least=1) + super().problems()

    def chats(self) -> list[ChatDocument]:
        """The chats, made anew each time one is read."""
        return [self._document(number) for number in range(self.num_chats)]

    def _document(self, number: int) -> ChatDocument:
        load = partial(made_up_line, number, self.text_seed)
        raw = load()
        return ChatDocument(f"made-up:{number}", len(raw), load, *self.reader.measure(raw))
