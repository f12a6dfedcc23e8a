"""Lines in the messages format: what is read, and what is refused."""

import json

import pytest

from lightning_dcp.data.chat.messages import Part, ToolCall, read_chat
from lightning_dcp.errors import DataError


def read(*messages, **others):
    return read_chat(json.dumps({"messages": messages, **others}).encode())


def user(content="hi", **others):
    return {"role": "user", "content": content, **others}


def call(name="find", arguments='{"x": 1}'):
    return {"id": "a1", "type": "function", "function": {"name": name, "arguments": arguments}}


def test_roles_calls_and_returns():
    tool = {"type": "function", "function": {"name": "find"}}
    chat = read(
        {"role": "system", "content": "be brief"},
        user("where?"),
        {"role": "assistant", "content": None, "tool_calls": [call(), call("see", {"y": "é"})]},
        {"role": "tool", "tool_call_id": "a1", "name": "find", "content": ""},
        {"role": "assistant", "content": "there", "weight": 0},
        tools=[tool],
        source="left alone",
    )
    assert [message.role for message in chat.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert [message.text for message in chat.messages] == ["be brief", "where?", "", "", "there"]
    assert chat.messages[0].parts == (Part("be brief", "system"),)
    assert chat.messages[2].tool_calls == (ToolCall("find", '{"x": 1}'), ToolCall("see", '{"y": "é"}'))
    assert chat.messages[3].name == "find"
    assert [message.learn for message in chat.messages] == [True, True, True, True, False]
    assert chat.tools == (tool,)
    assert read(user()).tools == ()


def test_a_call_without_its_wrapping():
    chat = read({"role": "assistant", "tool_calls": [{"name": "find", "arguments": {}}]})
    assert chat.messages[0].tool_calls == (ToolCall("find", "{}"),)


def test_parts_are_joined_where_they_are_alike():
    parts = [
        {"type": "text", "text": "one "},
        {"type": "text", "text": "two"},
        {"type": "text", "text": ""},
        {"type": "text", "text": "page", "kind": "document"},
        {"type": "text", "text": "dense", "kind": "document", "density": 3},
    ]
    message = read(user(parts)).messages[0]
    assert message.parts == (Part("one two", "user"), Part("page", "document"), Part("dense", "document", 3))
    assert message.text == "one twopagedense"
    message = read(user(parts, density=2.5, kind="page")).messages[0]
    assert [(p.kind, p.density) for p in message.parts] == [("page", 2.5), ("document", 2.5), ("document", 3)]
    assert message.density == 2.5


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (b"{", "not valid JSON"),
        (b"\xff", "not valid JSON"),
        (b"[]", "not a JSON object but a list"),
        (b'{"text": "a"}', "'messages' must be a list of at least one message; the keys are ['text']"),
        (b'{"messages": []}', "it is []"),
        (b'{"messages": {}}', "it is {}"),
        (b'{"messages": [3]}', "messages[0] is 3, not an object"),
    ],
)
def test_lines_that_are_no_chats(line, found):
    with pytest.raises(DataError) as error:
        read_chat(line)
    assert found in str(error.value)


@pytest.mark.parametrize(
    ("message", "found"),
    [
        ({"content": "a"}, ".role is missing"),
        ({"role": "", "content": "a"}, ".role is ''"),
        ({"role": 3, "content": "a"}, ".role is 3"),
        ({"role": "user"}, ".content is missing, and there are no tool_calls"),
        ({"role": "assistant", "content": None}, ".content is missing"),
        (user(3), ".content is 3"),
        (user(["a"]), ".content[0] is 'a': only text can be trained on"),
        (user([{"type": "image_url", "image_url": "x"}]), ".content[0] is 'image_url': only text"),
        (user([{"type": "text"}]), ".content[0].text is None"),
        (user([{"type": "text", "text": "a", "density": 0}]), ".content[0].density is 0"),
        (user([{"type": "text", "text": "a", "kind": ""}]), ".content[0].kind is ''"),
        (user(density=-1), ".density is -1"),
        (user(density=True), ".density is True"),
        (user(density="2"), ".density is '2'"),
        (user(density=10**400), ".density is 1000"),
        (user(density=float("inf")), ".density is inf"),
        (user(kind="\ud800"), ".kind is '\\ud800': the text cannot be encoded as UTF-8"),
        (user(name="\ud800"), ".name is '\\ud800': the text cannot be encoded as UTF-8"),
        (user([{"type": "text", "text": "a", "kind": "\ud800"}]), ".content[0].kind is '\\ud800': the text"),
        (user(weight=0.5), ".weight is 0.5"),
        (user(weight=True), ".weight is True"),
        (user(name=7), ".name is 7"),
        (user(kind=""), ".kind is ''"),
        (user(tool_calls=[call()]), " has tool_calls, which only a message of the role 'assistant' has"),
        ({"role": "assistant", "tool_calls": "x"}, ".tool_calls is 'x', not a list"),
        ({"role": "assistant", "tool_calls": ["x"]}, ".tool_calls[0] is 'x'; give"),
        ({"role": "assistant", "tool_calls": [call("")]}, ".tool_calls[0].name is ''"),
        ({"role": "assistant", "tool_calls": [call("f", None)]}, ".tool_calls[0].arguments is None"),
        ({"role": "assistant", "content": "", "function_call": {"name": "f"}}, ".function_call is an older form"),
    ],
)
def test_what_is_wrong_with_a_message(message, found):
    with pytest.raises(DataError) as error:
        read(user(), message)
    assert f"messages[1]{found}" in str(error.value)


def test_all_at_once():
    with pytest.raises(DataError) as error:
        read(user(3), {"role": "tool"}, user(density=0), tools=["x"], functions=[])
    text = str(error.value)
    assert text.count("; ") >= 4
    for found in ("messages[0].content", "messages[1].content", "messages[2].density", "'tools'", "'functions'"):
        assert found in text
