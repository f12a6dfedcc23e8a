"""Where the turns of a chat, and their parts, lie in the text that a chat template makes of it.

A template is known by what it writes only. The end of a turn is found by rendering the chat up to it, which must give the
beginning of the whole text; the header of an assistant turn by rendering what stands before it with a generation prompt;
and borders inside a turn by rendering the chat once more with a mark at each.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from lightning_dcp.data.chat.messages import ASSISTANT, OWN, TOOL_CALL, Chat, Message, Part
from lightning_dcp.errors import DataError

Render = Callable[[Sequence[dict[str, Any]], bool], str]
"""Writes messages as text, with or without a generation prompt; raises :class:`DataError` where the template fails."""

MARKS = range(0xE000, 0xF8FF)
"""Characters for private use: one that a text does not hold can mark places in it."""


@dataclass(frozen=True)
class CharSpan:
    """Characters from the end of the span before up to ``end``; otherwise as a :class:`~.pieces.Piece`."""

    end: int
    turn: int
    kind: str
    density: float | None
    learn: bool


def char_spans(chat: Chat, render: Render) -> tuple[str, list[CharSpan]]:
    """The text of a chat and what its characters are: ascending spans over all of it.

    Raises:
        DataError: a template that fails, that writes a turn differently when others follow, or that changes text whose
            inner borders are asked for.
    """
    messages = [for_template(message) for message in chat.messages]
    text = render(messages, False)
    ends = _ends(messages, text, render)
    places = [_inner_places(m, with_end=end is None) for m, end in zip(chat.messages, ends, strict=True)]
    marks = iter(_marked(messages, places, text, render))
    spans: list[CharSpan] = []
    start = 0
    for turn, (message, end, inner) in enumerate(zip(chat.messages, ends, places, strict=True)):
        found = [next(marks) for _ in inner]
        end = max(start, (found[-1] if found else start) if end is None else end)
        learned_from = _header_end(messages[:turn], text, render, start) if message.role == ASSISTANT else start
        spans += _turn(turn, message, [*accumulate(found, max, initial=start)][1:], end, min(learned_from, end))
        start = end
    return text, spans


def for_template(message: Message) -> dict[str, Any]:
    """A message as templates expect it: content as one string, arguments of tool calls as objects."""
    given = {key: value for key, value in message.given.items() if key not in OWN}
    given["content"] = message.text
    if message.tool_calls:
        given["tool_calls"] = [_call_for_template(call) for call in given["tool_calls"]]
    return given


def _call_for_template(call: dict[str, Any]) -> dict[str, Any]:
    if "function" in call:
        return call | {"function": _call_for_template(call["function"])}
    arguments = call["arguments"]
    try:
        parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return call
    return call | {"arguments": parsed} if isinstance(parsed, dict) else call


def _ends(messages: Sequence[dict[str, Any]], text: str, render: Render) -> list[int | None]:
    """Where each message ends; ``None`` where the template does not write it without what follows.

    Such a turn is then taken to end with its text.
    """
    ends: list[int | None] = []
    for count in range(1, len(messages)):
        start = max((end for end in ends if end is not None), default=0)
        ends.append(_prefix_end(messages[:count], text, render, start))
    return [*ends, len(text)]


def _prefix_end(messages: Sequence[dict[str, Any]], text: str, render: Render, start: int) -> int | None:
    """Where the last of these messages ends, which begins at ``start`` or later.

    Some templates write returns of tools that follow each other as one turn: what comes after a text may change when another
    message follows, but not the text, and nothing of a turn of the assistant, whose end is a target.
    """
    try:
        prefix = render(messages, False)
    except DataError:
        if messages[-1]["role"] == ASSISTANT:
            raise
        return None  # such as of a system message alone, by templates that want a user's
    if text.startswith(prefix):
        return len(prefix)
    same = _in_common(prefix, text)
    if messages[-1]["role"] != ASSISTANT and messages[-1]["content"].strip() in prefix[start:same]:
        return same
    raise DataError(
        f"the chat template writes messages[{len(messages) - 1}], or one before it, differently when another message "
        f"follows: {prefix[same : same + 30]!r} becomes {text[same : same + 30]!r} at character {same}, so its turns cannot be "
        "told apart. Use a template that writes a turn in the same way whatever follows it"
    )


def _header_end(before: Sequence[dict[str, Any]], text: str, render: Render, start: int) -> int:
    """Where the header of an assistant turn ends: what a generation prompt and the text have in common."""
    try:
        prompt = render(before, True)
    except DataError:  # no message before, or the template has none to go on from
        return start
    return start + _in_common(prompt[start:], text[start:]) if prompt[:start] == text[:start] else start


def _in_common(one: str, other: str) -> int:
    """Characters with which both begin."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _inner_places(message: Message, *, with_end: bool) -> list[int]:
    """Places inside a message's text that must be found again: after each part, and after all where calls follow.

    None lies in the white space around the text, which templates often strip.
    """
    text = message.text
    if not text.strip():
        return []
    least, most = len(text) - len(text.lstrip()), len(text.rstrip())
    ends = list(accumulate(len(part.text) for part in message.parts))
    asked = ends if message.tool_calls or with_end else ends[:-1]
    return [min(max(end, least), most) for end in asked]


def _marked(messages: list[dict[str, Any]], places: list[list[int]], text: str, render: Render) -> list[int]:
    """Where places inside messages lie in the text."""
    if not any(places):
        return []
    mark = next((chr(code) for code in MARKS if chr(code) not in text), None)
    if mark is None:
        raise DataError(
            f"the text holds all {len(MARKS)} characters for private use, of which one must be free to find borders inside "
            "messages. Take characters from U+E000 to U+F8FE out of it"
        )
    marked = [m | {"content": _with_marks(m["content"], p, mark)} for m, p in zip(messages, places, strict=True)]
    found = render(marked, False).split(mark)
    if "".join(found) != text or len(found) - 1 != sum(map(len, places)):
        raise DataError(
            "the chat template changes the text of messages, so borders inside them cannot be found: tool calls after text, and "
            "parts with a kind or density of their own. Leave these out, or use another template"
        )
    return list(accumulate(map(len, found[:-1])))


def _with_marks(content: str, places: Sequence[int], mark: str) -> str:
    borders = [0, *places, len(content)]
    return mark.join(content[start:end] for start, end in pairwise(borders))


def _turn(turn: int, message: Message, inner: Sequence[int], end: int, learned_from: int) -> Iterator[CharSpan]:
    """Spans of one turn: its parts with their header, then its tool calls, and the end of the turn with the last."""
    parts = message.parts if message.text.strip() else ()
    if not parts and not message.tool_calls:
        parts = (Part("", message.kind, message.density),)
    kinds = [(part.kind, part.density) for part in parts]
    if message.tool_calls:
        kinds.append((TOOL_CALL, message.density))
    ends = [*inner[: len(kinds) - 1], end]
    last = 0
    for (kind, density), border in zip(kinds, ends, strict=True):
        yield CharSpan(max(last, min(learned_from, border)), turn, kind, density, False)
        yield CharSpan(border, turn, kind, density, message.learn)
        last = border


def token_ends(spans: Sequence[CharSpan], starts: Sequence[int]) -> list[int]:
    """How many tokens begin before the end of each span: a token belongs to the span that it begins in.

    Args:
        spans: ascending.
        starts: first character of each token.
    """
    ascending = list(accumulate(starts, max))
    return [bisect_left(ascending, span.end) for span in spans]
