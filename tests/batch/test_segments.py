"""Segments in batches of every format: read, checked, cut with the samples, moved, and part of the fingerprint."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.plugins.precision import HalfPrecision

from lightning_dcp.batch import PackedBatch, Segment, jagged_to_packed, packed_to_padded, padded_to_packed
from lightning_dcp.batch.view import view
from lightning_dcp.errors import BatchError
from lightning_dcp.segments import as_segments
from tests.batch.formats import FORMATS, in_format, make_samples, same_batch

MAPPINGS = [*FORMATS[1:], "flattened"]
every_format = pytest.mark.parametrize("fmt", [*FORMATS, "flattened"])


def segments_of(length, number=0):
    """A few segments of one sample, with a gap before the last."""
    first = Segment(0, min(length, 1 + number % 2), "user", 0.3)
    rest = (Segment(first.end + 1, length, "tool", 2.5),) if length > first.end + 1 else ()
    return (first, *rest)


def batch_of(lengths, fmt, segments=None):
    """A batch of samples of these lengths with segments: made anew, so that nothing is shared between two."""
    given = [segments_of(n, i) for i, n in enumerate(lengths)] if segments is None else segments
    if fmt == "flattened":
        packed = PackedBatch.from_samples(make_samples(lengths))
        return {**packed.fields, "cu_seq_lens_q": packed.cu_seqlens, "segments": given}
    batch = in_format(make_samples(lengths), fmt)
    if fmt == "packed":
        return PackedBatch(batch.fields, batch.cu_seqlens, batch.sample_ids, given)
    return batch | {"segments": given}


@every_format
def test_a_view_reads_them(fmt):
    seen = view(batch_of([4, 2, 5], fmt))
    assert seen.segments == (
        (Segment(0, 1, "user", 0.3), Segment(2, 4, "tool", 2.5)),
        (Segment(0, 2, "user", 0.3),),
        (Segment(0, 1, "user", 0.3), Segment(2, 5, "tool", 2.5)),
    )
    seen.check()


@every_format
@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.randoms(use_true_random=False))
@settings(max_examples=25, deadline=None)
def test_they_are_cut_with_the_samples(fmt, lengths, random):
    """Also where as many samples as tokens, columns or segments make another reading possible."""
    rows = random.sample(range(len(lengths)), random.randint(1, len(lengths)))
    seen = view(batch_of(lengths, fmt))
    part = seen.part(rows)
    assert part.segments == tuple(seen.segments[i] for i in rows) == tuple(segments_of(lengths[i], i) for i in rows)
    assert view(part.batch).segments == part.segments


@pytest.mark.parametrize("fmt", MAPPINGS)
@pytest.mark.parametrize("kind", [list, tuple])
def test_two_samples_of_two_tokens_with_two_segments_each(fmt, kind):
    pair = kind([Segment(0, 1, "user"), Segment(1, 2, "tool", 2.0)])
    other = kind([Segment(0, 1, "system"), Segment(1, 2, "document", 1.5)])
    batch = batch_of([2, 2], fmt, kind([pair, other]))
    assert view(batch).select([1])["segments"] == kind([other])
    assert view(batch).part([1, 0]).segments == (tuple(other), tuple(pair))


@every_format
def test_batches_without_segments_have_none(fmt):
    batch = batch_of([3, 2], fmt, [None, None])
    assert view(batch).segments == ((), ())
    if fmt in FORMATS:
        assert view(in_format(make_samples([3, 2]), fmt)).segments is None
        assert view(in_format(make_samples([3, 2]), fmt)).part([1]).segments is None


def test_all_that_is_wrong_is_said_at_once():
    wrong = [[Segment(0, 9)], [Segment(1, 1), Segment(0, 2, "tool", -1.0)], [(0, 1, "user", 1.0, 7)], "text"]
    for fmt in ("packed", "padded", "jagged"):
        with pytest.raises(BatchError) as error:
            view(batch_of([3, 3, 3, 3], fmt, wrong)).check()
        text = str(error.value)
        assert "sample 0 of 3 tokens" in text
        assert "end at 3 or before" in text
        assert "sample 1 of 3 tokens" in text
        assert "a density is a finite number above 0" in text
        assert "sample 2 of 3 tokens: (0, 1, 'user', 1.0, 7) is no segment" in text
        assert "segments of sample 3 are a str" in text


FORMS = {
    "segment": lambda *values: Segment(*values),
    "tuple": lambda *values: values,
    "mapping": lambda *values: dict(zip(Segment._fields, values, strict=False)),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_all_forms_become_plain_values(form):
    given = form(np.int32(0), torch.tensor(2), np.str_("user"), np.float32(2))
    (read,) = as_segments([given], 3)
    assert read == Segment(0, 2, "user", 2.0)
    assert list(map(type, read)) == [int, int, str, float]
    assert repr(read) == "Segment(start=0, end=2, kind='user', density=2.0)"


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize(
    ("values", "found"),
    [
        ((0.0, 2), "whole numbers"),
        (("0", "2"), "whole numbers"),
        ((False, 2), "whole numbers"),
        ((0, float("inf")), "whole numbers"),
        ((0, None), "whole numbers"),
        ((0, 10**400), "end at 3 or before"),
        ((0, 2, None), "a kind"),
        ((0, 2, 3), "a kind"),
        ((0, 2, ["user"]), "a kind"),
        ((0, 2, ""), "a kind"),
        ((0, 2, "\ud800"), "a kind"),
        *(((0, 2, "user", value), "a density") for value in ("2", None, True, 0, float("nan"), float("inf"), 10**400)),
    ],
    ids=lambda value: f"{value!r:.40}",
)
def test_wrong_values_are_refused_in_all_forms(form, values, found):
    with pytest.raises(BatchError, match="sample some of 3 tokens") as error:
        as_segments([form(*values)], 3, sample="some")
    assert found in str(error.value)
    assert str(error.value).count("Segment(") == 1


def test_ids_that_no_terminal_takes_are_told_with_escapes():
    with pytest.raises(BatchError, match=r"sample \\ud800 of 3 tokens"):
        as_segments([Segment(0, 9)], 3, sample="\ud800")


def test_everything_wrong_with_one_sample_is_said():
    with pytest.raises(BatchError) as error:
        as_segments([5, (0.5, 2, 3, "x"), Segment(0, 2), Segment(1, 9)], 3)
    assert [words in str(error.value) for words in ("5 is no", "whole", "a kind", "a density", "begin at 2")] == [
        True
    ] * 5


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ([[]], "a list of 1"),
        (torch.zeros(2, 3), "a Tensor"),
        ({"a": 1, "b": 2}, "a dict"),
        (Segment(0, 1), "a Segment of 4"),
    ],
)
def test_one_entry_a_sample_is_needed(given, found):
    with pytest.raises(BatchError, match=f"2 sample.s. are {found}: give a list"):
        view(batch_of([3, 2], "padded", given)).check()
    with pytest.raises(BatchError, match=f"2 sample.s. are {found}: give a list"):
        batch_of([3, 2], "packed", given)


def test_samples_are_named_by_their_ids():
    with pytest.raises(BatchError, match="sample 70 of 2 tokens"):
        PackedBatch.from_samples(make_samples([3, 2]), [40, 70], [[], [Segment(0, 3)]])


def test_a_packed_batch_keeps_them(monkeypatch):
    batch = batch_of([4, 2, 5], "packed")
    expected = batch.segments
    assert PackedBatch.from_samples(make_samples([4, 2, 5]), segments=list(expected)).segments == expected
    assert batch.to("cpu").segments == expected
    assert batch.to(torch.float64).segments == expected
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)  # needs a GPU
    assert batch.pin_memory().segments == expected
    assert batch.select([2, 0]).segments == (expected[2], expected[0])
    assert "segments" not in batch
    assert "segments" not in set(batch)
    given = [[{"start": 0, "end": 2, "kind": "user"}], [(1, 2)], []]
    read = PackedBatch.from_samples(make_samples([4, 2, 5]), segments=given).segments
    assert read == ((Segment(0, 2, "user"),), (Segment(1, 2),), ())


@pytest.mark.parametrize("side", ["right", "left"])
def test_conversions_keep_them(side):
    packed = batch_of([4, 2, 5], "packed")
    padded = packed_to_padded(packed, padding_side=side)
    assert padded["segments"] == list(packed.segments)
    assert same_batch(padded_to_packed(padded), packed)
    assert same_batch(jagged_to_packed(batch_of([4, 2, 5], "jagged")), packed)
    assert "segments" not in packed_to_padded(in_format(make_samples([2]), "packed"))


@every_format
def test_lightning_moves_and_casts_a_batch_and_leaves_them_alone(fmt):
    batch = batch_of([4, 2, 5], fmt)
    expected = view(batch_of([4, 2, 5], fmt)).segments
    moved = HalfPrecision("bf16-true").convert_input(move_data_to_device(batch, torch.device("cpu")))
    assert view(moved).segments == expected
    assert all(type(segment) is Segment for sample in view(moved).segments for segment in sample)
    if fmt != "packed":
        assert moved["segments"] == [segments_of(n, i) for i, n in enumerate([4, 2, 5])]
        assert all(type(segment) is Segment for sample in moved["segments"] for segment in sample)
        assert moved["vector"].dtype == torch.bfloat16


@every_format
@pytest.mark.parametrize(
    "change",
    [
        lambda s: [s[0], s[1], s[2][:1]],
        lambda s: [s[1], s[1], s[2]],
        lambda s: [s[0], s[1], (s[2][0], s[2][1]._replace(density=2.6))],
        lambda s: [s[0], s[1], (s[2][0], s[2][1]._replace(kind="user"))],
        lambda s: [s[0], s[1], (s[2][0], s[2][1]._replace(start=3))],
    ],
)
def test_the_fingerprint_covers_them(fmt, change):
    fingerprint = view(batch_of([4, 2, 5], fmt)).fingerprint()
    assert view(batch_of([4, 2, 5], fmt)).fingerprint() == fingerprint
    own = [segments_of(n, i) for i, n in enumerate([4, 2, 5])]
    assert view(batch_of([4, 2, 5], fmt, change(own))).fingerprint() != fingerprint
    assert view(batch_of([4, 2, 5], fmt, [list(map(tuple, s)) for s in own])).fingerprint() == fingerprint


@pytest.mark.parametrize("name", ["segments", "chosen_segments", "rejected_segments"])
def test_pairs_have_no_segments(name):
    pair = {f"{side}_input_ids": torch.ones(2, 3, dtype=torch.int64) for side in ("chosen", "rejected")}
    view(pair).check()
    assert view(pair).segments is None
    seen = view(pair | {name: [segments_of(3), segments_of(3)]})
    for use in (seen.check, seen.fingerprint):
        with pytest.raises(BatchError, match=f"^{name}: samples of several sequences each"):
            use()
