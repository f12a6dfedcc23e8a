import json
import math

import numpy as np
import pytest

from lightning_dcp.errors import ConfigurationError, DataError
from lightning_dcp.schedule.distributions import DISTRIBUTIONS, draw_lengths, read_lengths

EVERY = pytest.mark.parametrize("name", DISTRIBUTIONS)


def many(name):
    return np.array(draw_lengths(name, 200_000, 3))


@EVERY
def test_the_same_arguments_give_the_same_lengths(name):
    first = draw_lengths(name, 500, 7)
    assert first == draw_lengths(name, 500, 7)
    assert first != draw_lengths(name, 500, 8)


@EVERY
def test_lengths_are_plain_integers_in_their_range(name):
    lengths = draw_lengths(name, 20_000, 0)
    distribution = DISTRIBUTIONS[name]
    assert len(lengths) == 20_000
    assert {type(length) for length in lengths} == {int}
    assert min(lengths) >= distribution.shortest
    assert max(lengths) <= (distribution.longest or max(lengths))


@EVERY
def test_longer_samples_are_cut(name):
    cut, whole = draw_lengths(name, 5000, 1, longest=9000), draw_lengths(name, 5000, 1)
    assert cut == [min(length, 9000) for length in whole]


def test_megatron_mock_is_lognormal_with_clipped_ends():
    lengths = many("megatron-mock")
    assert np.median(lengths) == pytest.approx(1024 * math.exp(-(1.5**2) / 2), rel=0.02)
    assert (lengths.min(), lengths.max()) == (128, 8192)
    inside = np.log(lengths[(lengths > 128) & (lengths < 8192)])
    assert np.quantile(np.log(lengths), 0.8413) - np.median(np.log(lengths)) == pytest.approx(1.5, rel=0.02)
    assert inside.std() < 1.5


def test_a_tenth_of_the_rollouts_ends_at_the_limit():
    lengths = many("rl")
    by_chance = 1 - 0.5 * (1 + math.erf(math.log(28672 / 3000) / 0.8 / math.sqrt(2)))
    assert (lengths == 28672).mean() == pytest.approx(0.1 + 0.9 * by_chance, abs=0.003)
    assert np.median(lengths[lengths < 28672]) == pytest.approx(3000, rel=0.02)


def test_longalign_is_uniform_on_a_logarithmic_scale():
    octaves = np.log2(many("longalign") / 8192)
    assert 0 <= octaves.min() < 0.001
    assert 2.999 < octaves.max() <= 3
    shares = [((octaves >= k) & (octaves < k + 1)).mean() for k in range(3)]
    assert shares == pytest.approx([1 / 3] * 3, abs=0.005)


def test_llama3_sft_has_one_long_document_among_nine_hundred_chats():
    lengths = many("llama3-sft")
    assert np.median(lengths) == pytest.approx(800, rel=0.02)
    long = lengths[lengths > 14_000]  # 4 sigma of the chats
    assert len(long) / len(lengths) == pytest.approx(0.0011, rel=0.2)
    assert long.mean() == pytest.approx(37_600, rel=0.05)


def test_all_that_is_wrong_with_a_draw_is_told_at_once():
    with pytest.raises(ConfigurationError) as caught:
        draw_lengths("chats", 0, -1, longest=0)
    text = str(caught.value)
    assert len(caught.value.problems) == 4
    assert "lengths from 'chats'" in text
    assert "use one of megatron-mock, rl, longalign, llama3-sft" in text
    assert "seed=-1" in text
    assert "longest=0" in text


# ------------------------------------------------------------------------- files


@pytest.mark.parametrize("name", ["a.txt", "a.lengths", "a"])
def test_one_length_a_line_blank_lines_aside(name, tmp_path):
    path = tmp_path / name
    path.write_bytes(b"\xef\xbb\xbf12\n\n  7  \r\n1\n")
    assert read_lengths(path) == [12, 7, 1]
    assert read_lengths(str(path)) == [12, 7, 1]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("0", "a length of 0; every sample needs at least one token"),
        ("-4", "a length of -4"),
        ("2.5", "'2.5' is not a whole number"),
        ("nan", "'nan' is not a whole number"),
        ("12 tokens", "'12 tokens' is not a whole number"),
    ],
)
def test_a_line_that_is_no_length_is_named(line, complaint, tmp_path):
    path = tmp_path / "lengths.txt"
    path.write_text(f"5\n\n{line}\n")
    with pytest.raises(DataError) as caught:
        read_lengths(path)
    assert str(caught.value).startswith(f"{path}:3: {complaint}")


def test_a_field_of_json_lines_holds_a_length_or_a_list(tmp_path):
    path = tmp_path / "samples.jsonl"
    path.write_text('{"n": 3, "ids": [1, 2]}\n\n{"ids": [5], "n": 4}\n')
    assert read_lengths(path, "n") == [3, 4]
    assert read_lengths(path, "ids") == [2, 1]
    path.rename(tmp_path / "samples.txt")
    assert read_lengths(tmp_path / "samples.txt", "n") == [3, 4]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"m": 1}', "no field 'n'; the fields are ['m']"),
        ("[1]", "no field 'n'; the line is a list"),
        ("{n: 1}", "not valid JSON"),
        ('{"n": "five"}', "'five' is not a whole number"),
        ('{"n": 2.0}', "2.0 is not a whole number"),
        ('{"n": NaN}', "nan is not a whole number"),
        ('{"n": true}', "True is not a whole number"),
        ('{"n": null}', "None is not a whole number"),
        ('{"n": []}', "a length of 0"),
        ('{"n": -1}', "a length of -1"),
    ],
)
def test_a_json_line_without_a_length_is_named(line, complaint, tmp_path):
    path = tmp_path / "samples.jsonl"
    path.write_text(json.dumps({"n": 1}) + "\n" + line + "\n")
    with pytest.raises(DataError) as caught:
        read_lengths(path, "n")
    assert str(caught.value).startswith(f"{path}:2: {complaint}")


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint16])
def test_arrays_of_integers(kind, tmp_path):
    np.save(tmp_path / "a.npy", np.array([3, 1, 2], dtype=kind))
    lengths = read_lengths(tmp_path / "a.npy")
    assert lengths == [3, 1, 2]
    assert {type(length) for length in lengths} == {int}


@pytest.mark.parametrize(
    ("array", "complaint"),
    [
        (np.array([1.0, 2.0]), "must be a one-dimensional array of integers, not float64 of shape (2,)"),
        (np.array([[1, 2]]), "not int64 of shape (1, 2)"),
        (np.array([5, 0, -1]), "[1]: a length of 0"),
        (np.array([], dtype=np.int64), "holds no lengths"),
        (np.array([{}], dtype=object), "not an array of numbers"),
    ],
)
def test_arrays_of_anything_else_are_refused(array, complaint, tmp_path):
    np.save(tmp_path / "a.npy", array)
    with pytest.raises(DataError) as caught:
        read_lengths(tmp_path / "a.npy")
    assert complaint in str(caught.value)
    assert str(tmp_path / "a.npy") in str(caught.value)


@pytest.mark.parametrize("name", ["a.txt", "a.npy"])
def test_an_empty_file_is_refused(name, tmp_path):
    (tmp_path / name).touch()
    with pytest.raises(DataError, match=name):
        read_lengths(tmp_path / name)


@pytest.mark.parametrize("name", ["none.txt", "none.npy", "none.jsonl"])
def test_a_missing_file_is_refused(name, tmp_path):
    with pytest.raises(ConfigurationError, match=rf"{name}'\n    found: cannot be read"):
        read_lengths(tmp_path / name, "n" if name.endswith("jsonl") else None)


def test_a_binary_file_is_refused(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_lengths(tmp_path / "a.bin")


def test_json_lines_need_a_field(tmp_path):
    with pytest.raises(ConfigurationError, match="JSON lines and no field"):
        read_lengths(tmp_path / "a.jsonl")
