import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from lightning_dcp.data import Document, pick_documents, python_library_documents, split_of

FRACTIONS = st.floats(0, 1, exclude_max=True)
EXPECTED = {"json/decoder.py": "val", "chats.jsonl:12": "val", "a": "val", "b": "train", "c": "val", "d": "train"}


@given(st.text(), FRACTIONS, FRACTIONS)
def test_raising_the_fraction_moves_documents_to_validation_only(name, one, other):
    low, high = sorted([one, other])
    assert split_of(name, 0) == "train"
    assert split_of(name, 1) == "val"
    if split_of(name, low) == "val":
        assert split_of(name, high) == "val"


@given(st.lists(st.text(), unique=True), st.lists(st.text(), unique=True), FRACTIONS)
def test_adding_documents_moves_no_other(names, more, fraction):
    before = {name: split_of(name, fraction) for name in names}
    after = {name: split_of(name, fraction) for name in [*reversed(more), *names]}
    assert all(after[name] == side for name, side in before.items())


def test_values_are_fixed_for_good():
    # these may never change: a resumed run would train on what it validates on
    sides = {name: split_of(name, 0.5) for name in ("json/decoder.py", "chats.jsonl:12", "a", "b", "c", "d")}
    assert sides == EXPECTED


def test_the_same_in_another_process():
    code = "from lightning_dcp.data.split import split_of; print(*[split_of(str(i), 0.3) for i in range(40)])"
    out = subprocess.run([sys.executable, "-c", code], env={"PYTHONHASHSEED": "7"}, capture_output=True, text=True)
    assert out.stdout.split() == [split_of(str(i), 0.3) for i in range(40)]


def test_share_is_about_the_fraction():
    sides = [split_of(str(i), 0.1) for i in range(20_000)]
    assert 0.09 < sides.count("val") / len(sides) < 0.11


def test_file_names_that_are_not_utf8():
    assert split_of("bad\udcff.txt", 0.5) in ("train", "val")


def test_limit_keeps_order_and_a_mix_of_lengths_and_both_sides():
    documents = python_library_documents()
    few = pick_documents(documents, limit=40)
    assert len(few) == 40
    assert few == [document for document in documents if document in few]
    assert len({document.id[0] for document in few}) > 5
    assert max(d.size for d in few) > 20 * min(d.size for d in few)
    assert {split_of(document.id, 0.3) for document in few} == {"train", "val"}


def test_a_larger_limit_holds_the_smaller_one():
    documents = [Document(str(i), 1, bytes) for i in range(100)]
    assert set(pick_documents(documents, limit=10)) < set(pick_documents(documents[::-1], limit=11))
    assert pick_documents(documents, limit=None) == pick_documents(documents, limit=100) == documents
