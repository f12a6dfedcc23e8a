"""Chats as byte-level tokens, with ids beyond the bytes for the borders of turns, which no text can contain."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_dcp.data.chat.messages import KEYS, TOOL_CALL, Chat, Message, Part, as_json
from lightning_dcp.data.chat.pieces import Piece
from lightning_dcp.data.tokenizer import NUM_BYTES, ByteTokenizer, utf8
from lightning_dcp.errors import DataError

TOOLS = "tools"
"""Role, and kind, of the turn that holds the definitions of tools."""


class ChatByteTokenizer(ByteTokenizer):
    """One token a byte, and six more: a chat is ``bos_id``, then its turns.

    A turn is ``turn_id``, the role and, if the message has one, a space and the name, as text; ``content_id``; the text;
    for each tool call ``call_id``, the function's name, a line break and the arguments as JSON; and ``end_of_turn_id``. A
    chat with tools begins with a turn of the role ``tools`` that holds one JSON object a line. Ids of tool calls are left
    out: returns follow the calls in their order.

    ``bos_id`` belongs to the first turn. Targets are what a model has to write: from ``content_id``, not included, to
    ``end_of_turn_id``, included.
    """

    turn_id = NUM_BYTES + 2
    content_id = NUM_BYTES + 3
    call_id = NUM_BYTES + 4
    end_of_turn_id = NUM_BYTES + 5
    vocab_size = NUM_BYTES + 6

    def generation_prompt(self, role: str = "assistant") -> list[int]:
        """What stands before the text of a turn: the tokens after which a model answers."""
        return [self.turn_id, *utf8(role), self.content_id]


class ByteTurns:
    """Makes pieces of chats by :class:`ChatByteTokenizer`."""

    def __init__(self) -> None:
        self.tokenizer = ChatByteTokenizer()

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return self.tokenizer.vocab_size

    def encode(self, chat: Chat) -> list[Piece]:
        """All tokens of a chat, in order.

        Raises:
            DataError: text that UTF-8 cannot encode, or keys of messages that have no place in these turns.
        """
        self._refuse_others(chat)
        turns = [*_tools_turn(chat), *chat.messages]
        found = [piece for turn, message in enumerate(turns) for piece in self._turn(turn, message)]
        first = found[0]
        return [Piece([self.tokenizer.bos_id], 0, first.kind, first.density, False), *found]

    def _refuse_others(self, chat: Chat) -> None:
        problems = [
            f"messages[{i}].{key} has no place among byte-level turns: leave it out, or use a tokenizer whose chat "
            "template knows it"
            for i, message in enumerate(chat.messages)
            for key, value in message.given.items()
            if key not in KEYS and value is not None
        ]
        if problems:
            raise DataError("; ".join(problems))

    def _turn(self, turn: int, message: Message) -> Iterator[Piece]:
        """Header, parts, tool calls and end of a turn."""
        ids = self.tokenizer
        parts = message.parts or (() if message.tool_calls else (Part("", message.kind, message.density),))
        first = parts[0] if parts else Part("", TOOL_CALL, message.density)
        header = f"{message.role} {message.name}" if message.name else message.role
        yield Piece([ids.turn_id, *utf8(header), ids.content_id], turn, first.kind, first.density, False)
        for part in parts:
            yield Piece(utf8(part.text), turn, part.kind, part.density, message.learn)
        last = Part("", TOOL_CALL, message.density) if message.tool_calls else parts[-1]
        calls = [i for call in message.tool_calls for i in (ids.call_id, *utf8(f"{call.name}\n{call.arguments}"))]
        yield Piece([*calls, ids.end_of_turn_id], turn, last.kind, last.density, message.learn)


def _tools_turn(chat: Chat) -> list[Message]:
    if not chat.tools:
        return []
    text = "\n".join(map(as_json, chat.tools))
    return [Message(TOOLS, TOOLS, (Part(text, TOOLS),), (), None, True, {})]
