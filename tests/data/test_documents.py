import json
import os
import pickle
import sysconfig
from pathlib import Path

import pytest

from lightning_dcp.data import Document, python_library_documents, text_documents
from lightning_dcp.errors import DataError


def write_lines(path, *lines):
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines))
    return path


def ids(documents):
    return [document.id for document in documents]


# The standard library


def test_library_lengths_are_very_mixed():
    documents = python_library_documents()
    sizes = [document.size for document in documents]
    assert 0 < min(sizes) < 60
    assert max(sizes) > 300_000
    assert len(sizes) > 500
    assert ids(documents) == sorted(ids(documents))
    assert len(set(ids(documents))) == len(documents)


def test_library_holds_no_installed_packages_and_no_empty_files():
    documents = python_library_documents()
    folders = {part for document in documents for part in document.id.split("/")[:-1]}
    assert not folders & {"site-packages", "dist-packages", "__pycache__"}
    assert "json/decoder.py" in ids(documents)
    root = Path(sysconfig.get_paths()["stdlib"])
    empty = [path for path in root.glob("*/**/__init__.py") if not path.stat().st_size]
    assert empty
    assert not {path.relative_to(root).as_posix() for path in empty} & set(ids(documents))


def test_library_texts_are_read_byte_for_byte():
    documents = python_library_documents()
    root = Path(sysconfig.get_paths()["stdlib"])
    for document in documents[::50]:
        assert document.read() == (root / document.id).read_bytes()
        assert pickle.loads(pickle.dumps(document)) == document


def test_python_without_sources(monkeypatch, tmp_path):
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(DataError, match=f"without the sources.*{tmp_path}"):
        python_library_documents()
    (tmp_path / "latin.py").write_bytes(b"# \xe9\n")
    (tmp_path / "empty.py").touch()
    (document,) = python_library_documents()
    assert document.read() == b"# \xe9\n"


# Text files


@pytest.fixture
def corpus(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.txt").write_text("bee")
    (tmp_path / "sub" / "a.MD").write_text("ay")
    (tmp_path / "sub" / "code.py").write_text("x = 1")
    write_lines(tmp_path / "c.jsonl", {"text": "eins"}, b"", {"text": "zwölf"})
    return tmp_path


def test_folder(corpus):
    documents = text_documents(corpus)
    assert ids(documents) == ["b.txt", "c.jsonl:1", "c.jsonl:3", "sub/a.MD"]
    assert [d.read().decode() for d in documents] == ["bee", "eins", "zwölf", "ay"]
    assert [d.size for d in documents] == [3, 4, 6, 2]
    assert pickle.loads(pickle.dumps(documents)) == documents
    assert ids(text_documents(corpus, suffixes=[".py"])) == ["sub/code.py"]


def test_file_and_glob_ignore_suffixes(corpus, monkeypatch):
    assert ids(text_documents(corpus / "sub" / "code.py")) == ["code.py"]
    assert ids(text_documents(f"{corpus}/**/*.py")) == ["sub/code.py"]
    assert ids(text_documents(f"{corpus}/*")) == ["b.txt", "c.jsonl:1", "c.jsonl:3"]
    monkeypatch.chdir(corpus)
    assert ids(text_documents("s*b/*.py")) == ["sub/code.py"]
    assert ids(text_documents("**/*.py")) == ["sub/code.py"]


def test_ids_are_the_same_by_folder_and_by_pattern(corpus):
    by_folder = text_documents(corpus, suffixes=[".txt", ".md", ".py"])
    assert [i for i in ids(text_documents(f"{corpus}/**/*.*")) if "jsonl" not in i] == ids(by_folder)


def test_text_field_and_byte_order_mark(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"body": "one"}\r\n{"body": "two"}\r\n\r\n')
    documents = text_documents(path, text_field="body")
    assert [d.read() for d in documents] == [b"one", b"two"]


BAD_LINES = [
    (b'{"text": "open', "not valid JSON"),
    (b'{"text": "\xff"}', "not valid JSON"),
    (b"[" * 100_000, "not valid JSON"),
    (b'["text"]', "not a JSON object but a list"),
    ({"body": "x", "a": 1}, r"no field 'text'; the fields are ['a', 'body']"),
    ({"text": 7}, "field 'text' holds a int, not a string"),
    ({"text": None}, "field 'text' holds a NoneType, not a string"),
    ({"text": ""}, "field 'text' is empty"),
    (rb'{"text": "\ud800"}', "the text cannot be encoded as UTF-8"),
]


@pytest.mark.parametrize(("line", "why"), BAD_LINES)
def test_bad_line_names_file_and_line(tmp_path, line, why):
    path = write_lines(tmp_path / "a.jsonl", {"text": "fine"}, b"", line, {"text": "fine"})
    with pytest.raises(DataError) as error:
        text_documents(tmp_path)
    first, only = str(error.value).splitlines()
    assert first.startswith("1 file(s) or line(s)")
    assert only.startswith(f"  {path}:3: {why}")


def test_all_bad_files_and_lines_in_one_error(tmp_path):
    (tmp_path / "good.txt").write_text("fine")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "none.jsonl").write_text("\n \n")
    (tmp_path / "gone.md").symlink_to(tmp_path / "nowhere")
    write_lines(tmp_path / "lines.jsonl", {"text": ""}, {"text": "fine"}, {"text": 1})
    with pytest.raises(DataError) as error:
        text_documents(tmp_path)
    assert str(error.value).splitlines() == [
        "5 file(s) or line(s) cannot be used:",
        f"  {tmp_path}/empty.txt: is empty",
        f"  {tmp_path}/gone.md: No such file or directory",
        f"  {tmp_path}/lines.jsonl:1: field 'text' is empty",
        f"  {tmp_path}/lines.jsonl:3: field 'text' holds a int, not a string",
        f"  {tmp_path}/none.jsonl: holds no samples (no line that is not blank)",
    ]


def test_unreadable_file_is_named(tmp_path, monkeypatch):
    path = tmp_path / "secret.txt"
    path.write_text("x")

    def refuse(self, *args, **kwargs):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(DataError, match=f"{path}: Permission denied"):
        text_documents(tmp_path)


def test_folder_that_cannot_be_listed_is_named(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "closed").mkdir()
    scandir = os.scandir

    def refuse(path):
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(DataError, match=f"{tmp_path}/closed: Permission denied"):
        text_documents(tmp_path)


@pytest.mark.parametrize(
    ("bad", "listed", "last"), [(20, 20, None), (21, 20, "  and 1 more"), (57, 20, "  and 37 more")]
)
def test_long_listings_are_capped(tmp_path, bad, listed, last):
    path = write_lines(tmp_path / "a.jsonl", *[b"{"] * bad)
    with pytest.raises(DataError) as error:
        text_documents(path)
    lines = str(error.value).splitlines()
    assert lines[0].startswith(f"{bad} file(s)")
    assert sum(":" in line for line in lines[1:]) == listed
    assert lines[20].startswith(f"  {path}:20: ")
    assert lines[21:] == ([last] if last else [])


def test_nothing_matched_says_what_was_searched(tmp_path):
    (tmp_path / "a.bin").write_text("x")
    with pytest.raises(DataError, match=rf"the folder {tmp_path} and all below it for files ending in \.txt, \.md"):
        text_documents(tmp_path)
    with pytest.raises(DataError, match=rf"match the pattern {tmp_path}/\*\.txt"):
        text_documents(f"{tmp_path}/*.txt")
    with pytest.raises(DataError, match=rf"{tmp_path}/nowhere does not exist"):
        text_documents(tmp_path / "nowhere")


def test_document_that_changed_or_vanished(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("four")
    (document,) = text_documents(path)
    path.write_text("seven..")
    with pytest.raises(DataError, match=r"'a\.txt' had 4 bytes when listed and now has 7"):
        document.read()
    path.unlink()
    with pytest.raises(DataError, match=r"'a\.txt' cannot be read any more"):
        document.read()


def test_document_is_frozen():
    with pytest.raises(AttributeError):
        Document("a", 1, bytes).id = "b"
