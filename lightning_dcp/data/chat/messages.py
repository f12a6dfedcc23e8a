"""Chats in the messages format: one JSON object a line, read and checked."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_dcp.batch.segments import is_number
from lightning_dcp.data.jsonl import json_object
from lightning_dcp.data.tokenizer import utf8
from lightning_dcp.errors import DataError

ASSISTANT = "assistant"
TOOL_CALL = "tool_call"
"""Kind of the tokens of an assistant turn's tool calls."""

KEYS = ("role", "content", "tool_calls", "tool_call_id", "name", "weight", "kind", "density")
"""Keys of a message that are known; a chat template of one's own may know more."""

OWN = ("weight", "kind", "density")
"""Keys that say how a message is trained on, and are no part of its text."""


@dataclass(frozen=True)
class Part:
    """Text of a message, of one kind and density.

    Attributes:
        text: the text; may be empty.
        kind: what it is; the message's role unless the data says otherwise.
        density: its own density; ``None``: that of its kind.
    """

    text: str
    kind: str
    density: float | None = None


@dataclass(frozen=True)
class ToolCall:
    """One call of a tool.

    Attributes:
        name: of the function.
        arguments: as JSON text.
    """

    name: str
    arguments: str


@dataclass(frozen=True)
class Message:
    """One turn.

    Attributes:
        role: who speaks.
        kind: kind of its text where a part does not say otherwise: the role, unless the data says otherwise.
        parts: its text; neighbours differ in kind or density, and none is empty.
        tool_calls: calls of tools, after the text.
        density: the message's own, which its tool calls have too; ``None``: that of their kind.
        learn: whether its tokens may be targets (``weight`` is not 0).
        given: the message as it was given, for chat templates.
    """

    role: str
    kind: str
    parts: tuple[Part, ...]
    tool_calls: tuple[ToolCall, ...]
    density: float | None
    learn: bool
    given: Mapping[str, Any]

    @property
    def text(self) -> str:
        """The text of all parts, one after another."""
        return "".join(part.text for part in self.parts)

    @property
    def name(self) -> str:
        """Who in this role speaks, such as the tool that a return is of; empty if nothing says so."""
        return self.given.get("name") or ""


@dataclass(frozen=True)
class Chat:
    """One sample.

    Attributes:
        messages: the turns.
        tools: definitions of tools, JSON objects.
    """

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()


def read_chat(raw: bytes) -> Chat:
    """The chat of one line of JSON.

    ``{"messages": [{"role": ..., "content": ..., "tool_calls": [...]}], "tools": [...]}``; other keys beside these are
    left alone. A content is a string, ``null`` beside tool calls, or a list of ``{"type": "text", "text": ...}``, whose texts
    are joined with nothing between them. Arguments of tool calls are JSON text or a JSON object. A message, or a part of its
    content, may have a ``density``, a number above 0, and a ``kind`` other than its role. ``weight`` 0 takes a message out of
    the loss.

    Raises:
        DataError: everything that is wrong with it, at once.
    """
    sample = json_object(raw)
    problems: list[str] = []
    if "functions" in sample:
        problems.append("'functions' is an older form of 'tools': [{'type': 'function', 'function': ...}]; rename it")
    tools = sample.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        problems.append("'tools' must be a list of objects")
    given = sample.get("messages")
    if not isinstance(given, list) or not given:
        found = f"the keys are {sorted(sample)}" if "messages" not in sample else f"it is {_short(given)}"
        problems.append(f"'messages' must be a list of at least one message; {found}")
        given = []
    messages = [_message(value, _Place(f"messages[{i}]", problems)) for i, value in enumerate(given)]
    if problems:
        raise DataError("; ".join(problems))
    return Chat(tuple(messages), tuple(tools))


@dataclass(frozen=True)
class _Place:
    """Where in a line something is read, and what was found wrong."""

    path: str
    problems: list[str]

    def at(self, step: str) -> _Place:
        return _Place(self.path + step, self.problems)

    def wrong(self, what: str) -> None:
        self.problems.append(f"{self.path}{what}")


def _message(given: Any, place: _Place) -> Message:
    if not isinstance(given, dict):
        place.wrong(f" is {_short(given)}, not an object")
        given = {"role": "?", "content": ""}
    role = _string(given, "role", place)
    density, weight = _density(given, place), given.get("weight")
    if weight is not None and (isinstance(weight, bool) or weight not in (0, 1)):
        place.wrong(f".weight is {_short(weight)}; give 0 or 1")
    if given.get("name") is not None:
        _string(given, "name", place)
    if given.get("function_call") is not None:
        place.wrong(
            ".function_call is an older form of 'tool_calls': [{'type': 'function', 'function': ...}]; rename it"
        )
    kind = _string(given, "kind", place) if given.get("kind") is not None else role
    calls = _calls(given.get("tool_calls"), place.at(".tool_calls"))
    if calls and role != ASSISTANT:
        place.wrong(f" has tool_calls, which only a message of the role {ASSISTANT!r} has; its role is {role!r}")
    parts = _parts(given, Part("", kind, density), bool(calls), place.at(".content"))
    return Message(role, kind, _joined(parts), calls, density, weight != 0, given)


def _parts(given: Mapping[str, Any], like: Part, calls: bool, place: _Place) -> list[Part]:
    content = given.get("content")
    if isinstance(content, str):
        return [Part(content, like.kind, like.density)]
    if isinstance(content, list):
        return [_part(value, like, place.at(f"[{i}]")) for i, value in enumerate(content)]
    if content is not None:
        place.wrong(f" is {_short(content)}; give a string or a list of parts")
    elif not calls:
        place.wrong(" is missing, and there are no tool_calls")
    return []


def _part(given: Any, like: Part, place: _Place) -> Part:
    if not isinstance(given, dict) or given.get("type") != "text":
        found = given.get("type") if isinstance(given, dict) else given
        place.wrong(f" is {_short(found)}: only text can be trained on, {{'type': 'text', 'text': ...}}")
        return like
    text = given.get("text")
    if not isinstance(text, str):
        place.wrong(f".text is {_short(text)}, not a string")
        return like
    kind = _string(given, "kind", place) if given.get("kind") is not None else like.kind
    density = _density(given, place)
    return Part(text, kind, like.density if density is None else density)


def _joined(parts: Sequence[Part]) -> tuple[Part, ...]:
    """Neighbours of one kind and density as one; none that is empty."""
    found: list[Part] = []
    for part in filter(lambda part: part.text, parts):
        if found and (found[-1].kind, found[-1].density) == (part.kind, part.density):
            part = Part(found.pop().text + part.text, part.kind, part.density)
        found.append(part)
    return tuple(found)


def _calls(given: Any, place: _Place) -> tuple[ToolCall, ...]:
    if given is None:
        return ()
    if not isinstance(given, list):
        place.wrong(f" is {_short(given)}, not a list")
        return ()
    return tuple(_call(value, place.at(f"[{i}]")) for i, value in enumerate(given))


def _call(given: Any, place: _Place) -> ToolCall:
    function = given.get("function", given) if isinstance(given, dict) else given
    if not isinstance(function, dict):
        place.wrong(f" is {_short(given)}; give {{'type': 'function', 'function': {{'name': ..., 'arguments': ...}}}}")
        return ToolCall("", "")
    name, arguments = _string(function, "name", place), function.get("arguments")
    if not isinstance(arguments, str | dict):
        place.wrong(f".arguments is {_short(arguments)}; give a JSON object, or one as text")
    return ToolCall(name, arguments if isinstance(arguments, str) else as_json(arguments))


def as_json(value: Any) -> str:
    """JSON text in one line, with characters as they are."""
    return json.dumps(value, ensure_ascii=False)


def _string(given: Mapping[str, Any], key: str, place: _Place) -> str:
    value = given.get(key)
    if isinstance(value, str) and value:
        return _encodable(value, f".{key}", place)
    place.wrong(f".{key} is {'missing' if key not in given else _short(value)}; give a string that is not empty")
    return "?"


def _encodable(text: str, step: str, place: _Place) -> str:
    """The text; what no file could hold is a problem."""
    try:
        utf8(text)
    except DataError as error:
        place.wrong(f"{step} is {_short(text)}: {error}")
    return text


def _density(given: Mapping[str, Any], place: _Place) -> float | None:
    value = given.get("density")
    if value is None or is_density(value):
        return value
    place.wrong(f".density is {_short(value)}; give a finite number above 0")
    return None


def is_density(value: Any) -> bool:
    """Whether a value is a finite number above 0."""
    return is_number(value) and value > 0


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
