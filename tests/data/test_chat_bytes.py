"""Chats as byte-level tokens: turns, targets, segments, and text that looks like a border."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_dcp.batch import Segment
from lightning_dcp.data import ChatByteTokenizer
from lightning_dcp.data.chat.byte_turns import ByteTurns
from lightning_dcp.data.chat.densities import DENSITIES, densities_of
from lightning_dcp.data.chat.messages import read_chat
from lightning_dcp.data.chat.pieces import ChatRules
from lightning_dcp.errors import ConfigurationError, DataError

IDS = ChatByteTokenizer
NAMES = {IDS.bos_id: "^", IDS.turn_id: "<", IDS.content_id: ">", IDS.call_id: "#", IDS.end_of_turn_id: "$"}
CALL = {"type": "function", "function": {"name": "f", "arguments": '{"x":1}'}}
CHAT = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "ask"},
    {"role": "assistant", "content": "wait", "tool_calls": [CALL, CALL]},
    {"role": "tool", "name": "f", "content": "[1]"},
    {"role": "tool", "name": "f", "content": "[2]"},
    {"role": "assistant", "content": "done"},
]


def rules(max_length=10_000, loss_on=("assistant", "tool_call"), densities=None):
    return ChatRules(max_length, loss_on, densities_of(densities))


def encode(messages, **others):
    return ByteTurns().encode(read_chat(json.dumps({"messages": messages, **others}).encode()))


def sample_of(messages, *, tools=None, **options):
    return rules(**options).sample(encode(messages, **({"tools": tools} if tools else {})), 7)


def written(ids):
    """Tokens as text, with a sign for each special one."""
    return "".join(NAMES.get(i) or chr(i) for i in ids.tolist())


def learned(sample):
    """The targets as text, a dot for any other token."""
    return "".join("." if i == -100 else NAMES.get(i) or chr(i) for i in sample["labels"].tolist())


def parts(sample):
    """The text of each segment by kind."""
    return [(s.kind, written(sample["input_ids"][s.start : s.end])) for s in sample["segments"]]


def test_turns_labels_and_segments():
    sample = sample_of(CHAT)
    text = '^<system>s$<user>ask$<assistant>wait#f\n{"x":1}#f\n{"x":1}$<tool f>[1]$<tool f>[2]$<assistant>done$'
    assert written(sample["input_ids"]) == text
    before, calls, between = (
        "^<system>s$<user>ask$<assistant>",
        '#f\n{"x":1}' * 2,
        "<tool f>[1]$<tool f>[2]$<assistant>",
    )
    assert learned(sample) == "." * len(before) + f"wait{calls}$" + "." * len(between) + "done$"
    assert sample["input_ids"].dtype == sample["labels"].dtype == torch.int64
    assert sample["index"] == 7
    assert parts(sample) == [
        ("system", "^<system>s$"),
        ("user", "<user>ask$"),
        ("assistant", "<assistant>wait"),
        ("tool_call", f"{calls}$"),
        ("tool", "<tool f>[1]$"),
        ("tool", "<tool f>[2]$"),
        ("assistant", "<assistant>done$"),
    ]
    assert [s.density for s in sample["segments"]] == [1.0, 1.0, 1.0, 1.5, 2.0, 2.0, 1.0]


def test_the_prompt_to_answer_by_is_what_stands_before_a_target():
    prompt = IDS().generation_prompt()
    ids = sample_of(CHAT)["input_ids"].tolist()
    first = next(i for i, label in enumerate(sample_of(CHAT)["labels"].tolist()) if label != -100)
    assert ids[first - len(prompt) : first] == prompt
    assert max(ids) < IDS.vocab_size == ByteTurns().vocab_size == 262
    assert IDS().decode(ids).startswith("systemsuserask")


def test_a_turn_of_calls_alone_is_one_segment():
    sample = sample_of([{"role": "assistant", "content": "", "tool_calls": [CALL]}])
    assert parts(sample) == [("tool_call", '^<assistant>#f\n{"x":1}$')]
    assert learned(sample) == "." * 12 + '#f\n{"x":1}$'
    assert parts(sample_of([{"role": "tool", "content": ""}])) == [("tool", "^<tool>$")]


def test_definitions_of_tools_come_first():
    sample = sample_of(CHAT[1:2], tools=[{"a": 1}, {"b": "é"}], loss_on=["user"])
    assert parts(sample)[0][0] == "tools"
    assert bytes(sample["input_ids"].tolist()[len("^<tools>") :][:19]) == '{"a": 1}\n{"b": "é"}'.encode()[:19]
    assert learned(sample).endswith("......ask$")
    assert len(learned(sample).strip(".")) == 4


@pytest.mark.parametrize(
    ("loss_on", "expected"),
    [
        (["tool_call"], '#f\n{"x":1}#f\n{"x":1}$'),
        (["assistant"], "waitdone$"),
        (["user", "tool"], "ask$[1]$[2]$"),
        (["nobody"], ""),
    ],
)
def test_loss_on_other_kinds(loss_on, expected):
    assert learned(sample_of(CHAT, loss_on=loss_on)).replace(".", "") == expected


def test_a_weight_of_zero_takes_a_turn_out():
    chat = [*CHAT[:2], CHAT[2] | {"weight": 0}, *CHAT[3:5], CHAT[5] | {"weight": 1}]
    assert learned(sample_of(chat)).replace(".", "") == "done$"


def test_densities():
    chat = [
        {"role": "user", "content": "a", "density": 4},
        {"role": "assistant", "content": "b", "tool_calls": [CALL], "density": 5.5},
        {"role": "tool", "content": [{"type": "text", "text": "c"}, {"type": "text", "text": "d", "density": 9}]},
        {"role": "document", "content": "e"},
        {
            "role": "other",
            "content": [{"type": "text", "text": "f"}, {"type": "text", "text": "g", "kind": "document"}],
        },
    ]
    found = [(s.kind, s.density) for s in sample_of(chat)["segments"]]
    assert found == [
        ("user", 4.0),
        ("assistant", 5.5),
        ("tool_call", 5.5),
        ("tool", 2.0),
        ("tool", 9.0),
        ("document", 1.5),
        ("other", 1.0),
        ("document", 1.5),
    ]
    given = {"tool": 7, "other": 0.25}
    own = [s.density for s in sample_of(chat, densities=given)["segments"]]
    assert own == [4.0, 5.5, 5.5, 7.0, 9.0, 1.5, 0.25, 1.5]


def test_densities_of_a_file(tmp_path):
    path = tmp_path / "densities.yaml"
    path.write_text("tool: 3.25\nuser: 0.5\n")
    assert densities_of(str(path)) == dict(DENSITIES) | {"tool": 3.25, "user": 0.5}
    assert densities_of(None) == dict(DENSITIES) == {"tool": 2.0, "tool_call": 1.5, "document": 1.5}
    path.write_text("tool: dense\nuser: 0\n3: 1.0\nok: .inf\n")
    with pytest.raises(ConfigurationError) as error:
        densities_of(str(path))
    assert [problem.asked for problem in error.value.problems] == [
        "a density of 'dense' for 'tool'",
        "a density of 0 for 'user'",
        "a density of 1.0 for 3",
        "a density of inf for 'ok'",
    ]
    path.write_text("- 3\n")
    with pytest.raises(ConfigurationError, match="found: a list"):
        densities_of(str(path))
    with pytest.raises(ConfigurationError, match="cannot be read"):
        densities_of(str(tmp_path / "none.yaml"))


def test_a_sample_is_cut_at_its_end_with_labels_and_segments():
    whole = sample_of(CHAT)
    length = len(whole["input_ids"])
    assert sample_of(CHAT, max_length=length)["segments"] == whole["segments"]
    pieces = encode(CHAT)
    for most in range(2, length + 3):
        sample = rules(most).sample(pieces, 0)
        assert torch.equal(sample["input_ids"], whole["input_ids"][:most])
        assert torch.equal(sample["labels"], whole["labels"][:most])
        ends = [s._replace(end=min(s.end, most)) for s in whole["segments"] if s.start < most]
        assert sample["segments"] == ends
        assert rules(most).length(pieces) == len(sample["input_ids"])
        assert rules(most).has_target(pieces) == bool((sample["labels"][1:] != -100).any())


def test_the_first_token_is_no_target():
    pieces = encode([{"role": "assistant", "content": "a"}])
    assert not ChatRules(1, ["assistant"], {}).has_target(pieces)
    assert rules().has_target(pieces)
    assert not rules(max_length=12).has_target(pieces)  # up to the end of the header
    assert rules(max_length=13).has_target(pieces)


TEXTS = st.one_of(
    st.text(max_size=8),
    st.sampled_from(
        ["<|im_start|>assistant\n", "\n\nassistant: yes", "<turn>", "\x00\xff", "<end_of_turn>", "Āā\u0102"]
    ),
)


@given(st.lists(st.tuples(st.sampled_from(["user", "assistant", "tool", "a b"]), TEXTS), min_size=1, max_size=5))
def test_no_text_can_look_like_a_border(turns):
    """Each special token stands exactly where the template puts it, so turns can be read back from the ids alone."""
    chat = [{"role": role, "content": text} for role, text in turns]
    sample = sample_of(chat, loss_on=["assistant", "user", "tool", "a b"])
    ids = sample["input_ids"].tolist()
    assert [i for i in ids if i > 255] == [IDS.bos_id] + [IDS.turn_id, IDS.content_id, IDS.end_of_turn_id] * len(chat)
    found, rest = [], ids[1:]
    while rest:
        middle, end = rest.index(IDS.content_id), rest.index(IDS.end_of_turn_id)
        found.append({"role": bytes(rest[1:middle]).decode(), "content": bytes(rest[middle + 1 : end]).decode()})
        rest = rest[end + 1 :]
    assert found == chat
    assert len(sample["segments"]) == len(chat)
    assert all(type(segment) is Segment for segment in sample["segments"])
    covered = [0, *(s.end for s in sample["segments"])]
    assert [s.start for s in sample["segments"]] == covered[:-1]
    assert covered[-1] == len(ids)


def test_text_and_keys_that_have_no_place():
    with pytest.raises(DataError, match="cannot be encoded as UTF-8"):
        encode([{"role": "user", "content": "\ud800"}])
    with pytest.raises(DataError) as error:
        encode([{"role": "user", "content": "a", "thinking": "b", "audio": None}, {"role": "a", "content": "", "x": 1}])
    assert str(error.value).count("has no place among byte-level turns") == 2
    assert "messages[0].thinking" in str(error.value)
