"""Chats as the tokens of a Hugging Face tokenizer, written by its own chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from lightning_dcp.data.chat.borders import char_spans, token_ends
from lightning_dcp.data.chat.messages import Chat
from lightning_dcp.data.chat.pieces import Piece
from lightning_dcp.errors import ConfigurationError, DataError, Problem


class TemplateTurns:
    """Makes pieces of chats by a tokenizer and its chat template.

    The whole text is tokenised at once, so tokens are those that the template's text has in use; a token belongs to the
    segment that it begins in. What the template writes before the first turn belongs to that turn.

    Args:
        folder: of the tokenizer, as ``save_pretrained`` writes it; nothing is downloaded.

    Raises:
        ConfigurationError: a tokenizer that cannot be loaded, that has no chat template, or that cannot say which characters
            a token stands for.
    """

    def __init__(self, folder: str) -> None:
        self.tokenizer = load_tokenizer(folder)

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return len(self.tokenizer)

    def encode(self, chat: Chat) -> list[Piece]:
        """All tokens of a chat, in order.

        Raises:
            DataError: a template that fails, or in whose text turns cannot be told apart.
        """
        text, spans = char_spans(chat, partial(self._render, chat.tools))
        tokens = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        borders = [0, *token_ends(spans, [start for start, _ in tokens["offset_mapping"]])]
        ids = tokens["input_ids"]
        return [
            Piece(ids[start:end], span.turn, span.kind, span.density, span.learn)
            for span, (start, end) in zip(spans, pairwise(borders), strict=True)
        ]

    def _render(self, tools: Sequence[Mapping[str, Any]], messages: Sequence[dict[str, Any]], generation: bool) -> str:
        try:
            text: str = self.tokenizer.apply_chat_template(
                list(messages), tools=list(tools) or None, tokenize=False, add_generation_prompt=generation
            )
        except Exception as error:  # a template may fail in any way
            raise DataError(f"the chat template cannot write it: {error or type(error).__name__}") from error
        return text


def load_tokenizer(folder: str) -> Any:
    """The tokenizer of a folder.

    Raises:
        ConfigurationError: it cannot be loaded or used.
    """
    asked = f"tokenizer={folder!r}"
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        found = f"transformers cannot be imported ({error})"
        raise _problem(asked, found, "pip install 'lightning-dcp[hf]', or tokenizer='bytes'") from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(Path(folder).expanduser(), local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        found = f"cannot be loaded: {error}"
        raise _problem(asked, found, "name a folder that tokenizer.save_pretrained wrote, or 'bytes'") from error
    if not tokenizer.is_fast:
        found = f"{type(tokenizer).__name__}, which does not say which characters a token stands for"
        raise _problem(asked, found, "use a tokenizer with a tokenizer.json (a fast one)")
    if not tokenizer.chat_template:
        found = "a tokenizer without a chat template"
        raise _problem(asked, found, "use that of a chat model, or set tokenizer.chat_template and save it again")
    return tokenizer


def _problem(asked: str, found: str, remedy: str) -> ConfigurationError:
    return ConfigurationError([Problem(asked, found, remedy)])
