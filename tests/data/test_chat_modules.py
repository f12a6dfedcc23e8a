"""Data modules over chats: files, labels and segments in batches of every format, lengths, warnings and errors."""

import json
import pickle
import warnings

import numpy as np
import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_dcp.batch.view import view
from lightning_dcp.commands.data_module import batches_of, build_data_module
from lightning_dcp.data import ChatByteTokenizer, ChatDataModule, ChatDocument, MadeUpChatDataModule, made_up_chat
from lightning_dcp.data.chat.densities import densities_of
from lightning_dcp.data.chat.made_up import made_up_line
from lightning_dcp.data.chat.messages import read_chat
from lightning_dcp.errors import ConfigurationError, DataError
from tests.data.chat_templates import save_tokenizer


def turn(role, content, **others):
    return {"role": role, "content": content, **others}


def chat(number):
    return [turn("user", "q" * (number + 1)), turn("assistant", "a" * (2 * number + 1)), turn("tool", "[1]")]


def write(path, chats):
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in chats))
    return str(path)


@pytest.fixture
def corpus(tmp_path):
    write(tmp_path / "one.jsonl", [chat(i) for i in range(20)])
    write(tmp_path / "two.jsonl", [chat(i) for i in range(20, 30)])
    (tmp_path / "notes.txt").write_text("not a chat")
    return str(tmp_path)


def set_up(module):
    module.setup("fit")
    return module


def test_samples_of_files(corpus):
    module = set_up(ChatDataModule(corpus, val_fraction=0.3, batch_size=4))
    assert {d.id.split(":")[0] for d in module.train_dataset.documents} == {"one.jsonl", "two.jsonl"}
    assert len(module.train_dataset) + len(module.val_dataset) == 30
    sample = module.train_dataset[3]
    assert set(sample) == {"input_ids", "labels", "segments", "index"}
    assert [s.kind for s in sample["segments"]] == ["user", "assistant", "tool"]
    assert [s.density for s in sample["segments"]] == [1.0, 1.0, 2.0]
    number = int(module.train_dataset.documents[3].id.split(":")[1]) - 1
    number += 20 * module.train_dataset.documents[3].id.startswith("two")
    assert int((sample["labels"] != -100).sum()) == 2 * number + 2  # the text and the end of the turn
    assert module.vocab_size == module.tokenizer.vocab_size == ChatByteTokenizer.vocab_size


@pytest.mark.parametrize("fmt", ["packed", "padded", "jagged"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_carry_segments(corpus, fmt, num_workers):
    module = set_up(ChatDataModule(corpus, format=fmt, batch_size=5, val_fraction=0, num_workers=num_workers))
    dataset, order = module.train_dataset, list(module.train_dataloader().sampler)
    seen = 0
    for batch in module.train_dataloader():
        samples = [dataset[i] for i in order[seen : seen + 5]]
        found = view(batch)
        found.check()
        assert found.segments == tuple(tuple(sample["segments"]) for sample in samples)
        assert found.lengths == tuple(len(sample["input_ids"]) for sample in samples)
        assert torch.equal(found.flatten(batch["labels"]), torch.cat([sample["labels"] for sample in samples]))
        assert found.part([2, 0]).segments == (found.segments[2], found.segments[0])
        seen += len(samples)
    assert seen == 30


def test_lengths_are_known_without_reading(corpus, monkeypatch):
    options = {"max_length": 60, "val_fraction": 0, "batch_size": 10}
    module = set_up(ChatDataModule(corpus, **options))
    lengths = module.train_dataset.lengths
    assert lengths == tuple(len(module.train_dataset[i]["input_ids"]) for i in range(30))
    assert max(lengths) == 60 > min(lengths)
    monkeypatch.setattr(ChatDocument, "read", lambda self: pytest.fail("a chat was read"))
    expected = [[lengths[i] for i in batch] for batch in module.train_dataloader().batch_sampler]
    assert [list(batch) for batch in batches_of(ChatDataModule(corpus, **options), 3)] == expected


def test_a_data_set_goes_to_workers(corpus, tmp_path):
    for tokenizer in ("bytes", save_tokenizer(tmp_path / "tokenizer")):
        dataset = set_up(ChatDataModule(corpus, tokenizer=tokenizer, densities={"tool": 3.0})).train_dataset
        again = pickle.loads(pickle.dumps(dataset))
        assert again[2]["segments"] == dataset[2]["segments"]
        assert torch.equal(again[2]["input_ids"], dataset[2]["input_ids"])


def test_a_tokenizer_of_a_folder(corpus, tmp_path):
    module = set_up(ChatDataModule(corpus, tokenizer=save_tokenizer(tmp_path / "tokenizer"), val_fraction=0))
    sample = module.train_dataset[0]
    decode = module.tokenizer.decode
    assert decode(sample["input_ids"]).startswith("<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\na<|im_end|>")
    assert decode(sample["labels"][sample["labels"] != -100]) == "a<|im_end|>\n"
    texts = [decode(sample["input_ids"][s.start : s.end]) for s in sample["segments"]]
    assert texts[2] == "<|im_start|>tool\n[1]<|im_end|>\n"
    assert module.vocab_size == len(module.tokenizer)


def test_bad_lines_are_named_all_at_once(tmp_path):
    lines = ['{"messages": [{"role": "user"}]}', "", '{"text": 1}', json.dumps({"messages": chat(1)}), "{"]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    (tmp_path / "b.jsonl").write_text("\n")
    with pytest.raises(DataError) as error:
        set_up(ChatDataModule(str(tmp_path)))
    text = str(error.value)
    assert text.startswith("4 file(s) or line(s) cannot be used:")
    assert "a.jsonl:1: messages[0].content is missing" in text
    assert "a.jsonl:3: 'messages' must be a list" in text
    assert "a.jsonl:5: not valid JSON" in text
    assert "b.jsonl: holds no samples" in text


def test_lines_that_a_template_cannot_write_are_named(tmp_path):
    folder = save_tokenizer(
        tmp_path / "t",
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
        "{{ m.role + m.content }}{% if not loop.last %}.{% endif %}{% endfor %}",
    )
    path = write(tmp_path / "a.jsonl", [chat(1), [turn("user", "a")], [turn("user", "a"), turn("assistant", "b")]])
    with pytest.raises(DataError) as error:
        set_up(ChatDataModule(path, tokenizer=folder))
    text = str(error.value)
    assert "a.jsonl:1: the chat template cannot write it: no tools" in text
    assert "a.jsonl:3: " not in text  # ".": the end of a turn is written only if another follows, and belongs to that


def test_nothing_is_found(tmp_path):
    with pytest.raises(DataError, match="no chats found"):
        set_up(ChatDataModule(str(tmp_path)))
    with pytest.raises(DataError, match="does not exist"):
        set_up(ChatDataModule(str(tmp_path / "none")))


def test_chats_without_a_target_are_counted_and_left_out(tmp_path):
    chats = (
        [chat(i) for i in range(8)] + [[turn("user", "only")]] * 6 + [[turn("user", "q" * 99), turn("assistant", "a")]]
    )
    path = write(tmp_path / "a.jsonl", chats)
    with pytest.warns(UserWarning, match="7 of 15 chats have no token to learn from within max_length=60") as caught:
        module = set_up(ChatDataModule(path, max_length=60, val_fraction=0))
    assert len([w for w in caught if "left out" in str(w.message)]) == 1
    assert "a.jsonl:9, a.jsonl:10, a.jsonl:11, a.jsonl:12, a.jsonl:13, ..." in str(caught[0].message)
    assert [d.id for d in module.train_dataset.documents] == [f"a.jsonl:{i + 1}" for i in range(8)]
    with pytest.raises(DataError, match=r"none of 15 chat.s. has a token to learn from.*loss_on=\['nobody'\]"):
        set_up(ChatDataModule(path, loss_on=["nobody"]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        set_up(ChatDataModule(path, loss_on=["user"], val_fraction=0))


def test_a_file_that_changes_is_found_out(tmp_path):
    path = write(tmp_path / "a.jsonl", [[turn("user", "q"), turn("assistant", "aé")]])
    module = set_up(ChatDataModule(path, val_fraction=0))
    whole = (tmp_path / "a.jsonl").read_text()
    (tmp_path / "a.jsonl").write_text(whole.replace("\\u00e9", "bbbbbb"))  # as many bytes, more tokens
    with pytest.raises(DataError, match=r"chat 'a.jsonl:1' had 24 tokens when listed and now has 28"):
        module.train_dataset[0]
    (tmp_path / "a.jsonl").write_text(whole[5:])
    with pytest.raises(DataError, match=r"'a.jsonl:1' had \d+ bytes when listed"):
        module.train_dataset[0]


def test_all_argument_problems_at_once(tmp_path):
    with pytest.raises(ConfigurationError) as error:
        ChatDataModule(
            "x",
            suffixes=[],
            tokenizer=str(tmp_path / "none"),
            densities={"tool": 0.0, "user": 1.0},
            loss_on="assistant",
            batch_size=0,
        )
    asked = [problem.asked for problem in error.value.problems]
    assert asked == [
        "suffixes=[]",
        "a density of 0.0 for 'tool'",
        "batch_size=0",
        "loss_on='assistant'",
        f"tokenizer='{tmp_path / 'none'}'",
    ]
    with pytest.raises(ConfigurationError, match="num_chats=0"):
        MadeUpChatDataModule(0)


# ------------------------------------------------------------------ made-up chats


@pytest.mark.parametrize("text", ["tool: 1" + "0" * 400, "tool: 1" + "0" * 5000, "tool: .inf", "[" * 100_000, "\0"])
def test_files_of_what_is_no_density_are_refused(tmp_path, text):
    (tmp_path / "densities.yaml").write_text(text)
    with pytest.raises(ConfigurationError, match="densit"):
        densities_of(str(tmp_path / "densities.yaml"))


def test_made_up_chats_are_the_same_everywhere():
    lines = [made_up_line(number) for number in range(200)]
    assert lines == [made_up_line(number) for number in range(200)]
    assert made_up_line(3, seed=1) != made_up_line(3)
    assert [json.loads(line) for line in lines[:5]] == [made_up_chat(number) for number in range(5)]
    assert made_up_line(0)[-60:] == b'ssistant", "content": "Yes: a pump of oak is on shelf 7."}]}'
    assert all(read_chat(line).messages[0].role == "system" for line in lines)


def test_made_up_chats_are_unequal_with_dense_returns_side_by_side():
    module = set_up(MadeUpChatDataModule(400, max_length=100_000, val_fraction=0))
    lengths = np.array(module.train_dataset.lengths)
    assert len(lengths) == 400
    assert lengths.min() < 250
    assert np.median(lengths) < 700
    assert 5_000 < lengths.max() < 10_000
    assert lengths.max() > 6 * lengths.mean()
    longest = module.train_dataset[int(lengths.argmax())]["segments"]
    side_by_side = max(sum(s.num_tokens for s in longest[i : i + 3] if s.kind == "tool") for i in range(len(longest)))
    assert side_by_side > 2_000
    kinds = {s.kind for sample in (module.train_dataset[i] for i in range(60)) for s in sample["segments"]}
    assert kinds == {"system", "tools", "user", "assistant", "tool", "tool_call", "document"}


def test_from_a_configuration(corpus, tmp_path):
    options = [f"--data.path={corpus}", "--data.loss_on=[user]", "--data.format=jagged", "--data.batch_size=3"]
    options += ["--data.densities={tool: 3.5}", "--data.suffixes=[.jsonl]"]
    cli = LightningCLI(BoringModel, ChatDataModule, run=False, args=options, save_config_callback=None)
    module = set_up(cli.datamodule)
    assert module.reader.rules.densities["tool"] == 3.5
    batch = next(iter(module.train_dataloader()))
    assert {s.density for sample in view(batch).segments for s in sample} == {1.0, 3.5}
    path = tmp_path / "data.yaml"
    path.write_text("data: {class_path: lightning_dcp.data.MadeUpChatDataModule, init_args: {num_chats: 30}}")
    assert build_data_module(str(path)).num_chats == 30
