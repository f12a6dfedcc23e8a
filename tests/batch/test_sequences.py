"""How the tensor of one model call lies, which need not be a field of the batch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dcp.batch import PackedBatch, packed_to_padded
from lightning_dcp.batch.masks import real_tokens
from lightning_dcp.batch.sequences import JaggedSequences, PackedSequences, PaddedSequences
from lightning_dcp.batch.view import view
from lightning_dcp.errors import BatchError
from tests.batch.formats import FORMATS, in_format, make_samples

LENGTHS = [4, 2, 5, 1]
LABELS = st.lists(st.lists(st.integers(0, 9), max_size=5), min_size=1, max_size=5)


def padded(lengths, *, side="right", width=None):
    return packed_to_padded(PackedBatch.from_samples(make_samples(lengths)), padding_side=side, length=width)


def nested(*parts):
    return torch.nested.nested_tensor([torch.as_tensor(part) for part in parts], layout=torch.jagged)


def laid_out(rows, kind, *, left=0, wide=0, fill=77):
    """The rows as a tensor of one kind, with its view; padding holds ``fill``."""
    lengths = [len(row) for row in rows]
    flat = torch.tensor([entry for row in rows for entry in row], dtype=torch.int64)
    if kind == "packed":
        return flat.unsqueeze(0), PackedSequences(tuple(lengths))
    if kind == "jagged":
        offsets = torch.tensor([0, *lengths]).cumsum(0)
        return torch.nested.nested_tensor_from_jagged(flat, offsets), JaggedSequences(offsets)
    value = torch.full((len(rows), left + max(lengths) + wide), fill)
    mask = torch.zeros(value.shape, dtype=torch.bool)
    for row, entries in enumerate(rows):
        value[row, left : left + len(entries)] = torch.tensor(entries, dtype=torch.int64)
        mask[row, left : left + len(entries)] = True
    return value, PaddedSequences(mask)


KINDS = pytest.mark.parametrize("kind", ["packed", "padded", "jagged"])


@KINDS
@given(LABELS, st.integers(0, 2), st.integers(0, 2))
@settings(max_examples=40, deadline=None)
def test_flatten_and_unflatten_lose_nothing_empty_sequences_included(kind, rows, left, wide):
    value, seen = laid_out(rows, kind, left=left, wide=wide)
    assert seen.lengths == tuple(map(len, rows))
    assert seen.per_token(value)
    flat = seen.flatten(value)
    assert flat.tolist() == [entry for row in rows for entry in row]
    back = seen.unflatten(flat + 1)
    assert seen.per_token(back)
    assert seen.flatten(back).tolist() == (flat + 1).tolist()
    if kind == "padded":
        assert not back[~seen.mask].any()
    wide_entries = torch.rand(len(flat), 2, 3)
    assert torch.equal(seen.flatten(seen.unflatten(wide_entries)), wide_entries)


@KINDS
@given(LABELS, st.integers(0, 2), st.integers(0, 2))
@settings(max_examples=40, deadline=None)
def test_labels_are_shifted_inside_each_sequence(kind, rows, left, wide):
    labels, seen = laid_out(rows, kind, left=left, wide=wide)
    shifted = seen.shifted(labels)
    assert seen.per_token(shifted)
    assert seen.flatten(shifted).tolist() == [entry for row in rows if row for entry in [*row[1:], -100]]
    if kind == "padded":
        assert (shifted[~seen.mask] == -100).all()
        assert (labels[~seen.mask] == 77).all()


@KINDS
def test_labels_of_another_shape_are_refused(kind):
    _, seen = laid_out([[1, 2], [3]], kind)
    with pytest.raises(BatchError, match=r"labels must hold one entry a token, .*; found shape \(2, 7\)"):
        seen.shifted(torch.zeros(2, 7))


@KINDS
def test_entries_are_counted_for_each_sequence(kind):
    value, seen = laid_out([[1, 5, 2], [], [7], [3, 9]], kind, left=1)
    flags = seen.unflatten(seen.flatten(value) > 4)
    assert seen.counts(flags) == (1, 0, 1, 1)


@pytest.mark.parametrize("kind", ["packed", "padded"])
def test_positions_may_have_an_axis_in_front(kind):
    value, seen = laid_out([[1, 2, 3], [4]], kind)
    assert seen.leading(value) == 0
    assert seen.leading(torch.stack([value] * 3)) == 1
    assert seen.leading(value.unsqueeze(-1)) == 0
    assert seen.leading(torch.zeros(3, 5, 7)) is None


# ------------------------------------------------------------------ what a batch makes of a call's tensor


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("name", ["input_ids", "vector", "flag"])
def test_tensors_of_the_batch_hold_its_own_sequences(fmt, name):
    batch = in_format(make_samples(LENGTHS), fmt)
    seen = view(batch)
    assert seen.sequences(batch[name]) is seen.tokens
    assert seen.tokens.lengths == seen.lengths == tuple(LENGTHS)
    assert seen.packed == (fmt == "packed")


@pytest.mark.parametrize("fmt", [f for f in FORMATS if f.startswith("padded")])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_a_mask_of_ones_changes_nothing(fmt, dtype):
    batch = in_format(make_samples(LENGTHS), fmt)
    seen = view(batch)
    for mask in (batch["attention_mask"], torch.ones_like(batch["attention_mask"]).to(dtype)):
        assert seen.sequences(batch["input_ids"], mask) is seen.tokens


def test_a_mask_of_the_call_with_zeros_is_followed():
    batch = padded(LENGTHS)
    mask = torch.tensor([[0, 1, 1, 0, 0], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0], [0, 0, 0, 0, 1]])
    call = view(batch).sequences(batch["input_ids"], mask)
    assert call.lengths == (2, 2, 0, 1)
    assert call.flatten(batch["input_ids"]).tolist() == batch["input_ids"][mask.bool()].tolist()


@pytest.mark.parametrize("fmt", ["padded", "padded-left", "jagged"])
def test_tensors_of_another_shape_are_rows_of_their_own(fmt):
    seen = view(in_format(make_samples(LENGTHS), fmt))
    joined = torch.arange(8 * 3).view(8, 3)
    assert seen.sequences(joined).lengths == (3,) * 8
    mask = (joined % 3 < torch.tensor([1, 2, 3, 0, 1, 2, 3, 0]).unsqueeze(1)).long()
    call = seen.sequences(joined, mask)
    assert call.lengths == (1, 2, 3, 0, 1, 2, 3, 0)
    assert call.flatten(joined).tolist() == [0, 3, 4, 6, 7, 8, 12, 15, 16, 18, 19, 20]
    assert call.shape_name == "[8, 3, ...]"
    assert call.per_token(torch.zeros(8, 3, 2))
    assert not call.per_token(torch.zeros(4, 3))


def test_inputs_without_their_last_token():
    """``model(input_ids[:, :-1], attention_mask=attention_mask[:, :-1])``, with and without the mask."""
    batch = padded(LENGTHS)
    ids, mask = batch["input_ids"][:, :-1], batch["attention_mask"][:, :-1]
    assert view(batch).sequences(ids, mask).lengths == (4, 2, 4, 1)
    assert view(batch).sequences(ids).lengths == (4, 2, 4, 1)
    assert view(batch).sequences(ids.clone()).lengths == (4, 4, 4, 4)


def test_padding_between_sequences_is_left_out():
    ids = torch.tensor([[1, 1, 1, 0], [2, 2, 0, 0]])
    call = view(padded([1, 1, 1])).sequences(ids, ids > 0)
    assert call.flatten(torch.arange(8).view(2, 4)).tolist() == [0, 1, 2, 4, 5]


@pytest.mark.parametrize("fmt", ["padded", "jagged"])
def test_a_jagged_tensor_is_read_by_its_own_offsets_whatever_the_mask(fmt):
    seen = view(in_format(make_samples(LENGTHS), fmt))
    value = nested([1, 2], [3, 4, 5])
    for mask in (None, torch.zeros(2, 3)):
        call = seen.sequences(value, mask)
        assert call.lengths == (2, 3)
        assert call.flatten(value).tolist() == [1, 2, 3, 4, 5]


def test_jagged_outputs_can_be_joined_with_the_tensor_of_the_call():
    seen = view(in_format(make_samples(LENGTHS), "jagged"))
    value = nested([1, 2], [3, 4, 5])
    out = seen.sequences(value).unflatten(torch.arange(5))
    assert (out * value).values().tolist() == [0, 2, 6, 12, 20]


def test_boundaries_of_a_packed_batch_win_over_any_mask():
    batch = in_format(make_samples(LENGTHS), "packed")
    seen = view(batch)
    for mask in (torch.ones(1, 12), torch.zeros(1, 12), torch.zeros(1, 1, 12, 12)):
        assert seen.sequences(batch["input_ids"], mask) is seen.tokens


@pytest.mark.parametrize(
    "value", [torch.zeros(1, 11), torch.zeros(2, 12), torch.zeros(12), torch.tensor(1.0)], ids=repr
)
def test_a_packed_batch_has_no_other_sequences(value):
    assert view(in_format(make_samples(LENGTHS), "packed")).sequences(value) is None


@pytest.mark.parametrize("fmt", ["padded", "jagged"])
@pytest.mark.parametrize("value", [torch.zeros(4), torch.tensor(1.0)], ids=repr)
def test_a_tensor_of_one_axis_holds_no_tokens(fmt, value):
    assert view(in_format(make_samples(LENGTHS), fmt)).sequences(value) is None


@pytest.mark.parametrize("shape", [(4, 5), (3, 7)])
@pytest.mark.parametrize(
    ("mask_of", "message"),
    [
        (lambda n, t: torch.zeros(n, 1, t, t), "has shape.*biases, are not supported"),
        (lambda n, t: torch.full((n, t), -1e9), "expected 0 and 1 .*additive masks"),
        (lambda n, t: torch.arange(n * t).view(n, t), "numbers of documents that share a row"),
        (lambda n, t: torch.arange(t).expand(n, t) % 2, "row 0 has holes"),
        (lambda n, t: torch.ones(n, t + 1), r"has shape \(\d, \d\), input_ids \(\d, \d\)"),
        (lambda n, t: [[1] * t] * n, "has shape list"),
    ],
)
def test_masks_of_a_call_that_cannot_be_read_are_refused(shape, mask_of, message):
    with pytest.raises(BatchError, match=message):
        view(padded(LENGTHS)).sequences(torch.zeros(shape), mask_of(*shape))


def test_a_jagged_tensor_is_no_mask():
    with pytest.raises(BatchError, match="has shape"):
        real_tokens(nested([1, 1], [1]), torch.zeros(2, 2))


# ------------------------------------------------------------------ positions


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(1, 4), st.randoms(use_true_random=False))
@settings(max_examples=30, deadline=None)
def test_positions_with_an_axis_in_front_are_cut_along_their_last_two(lengths, kinds, random):
    samples = make_samples(lengths)
    rows = random.sample(range(len(lengths)), random.randint(1, len(lengths)))
    for fmt in ("padded", "padded-left"):
        batch = in_format(samples, fmt)
        batch["position_ids"] = torch.stack([batch["index"] + 100 * k for k in range(kinds)])
        chosen = view(batch).select(rows)
        assert torch.equal(chosen["position_ids"], torch.stack([chosen["index"] + 100 * k for k in range(kinds)]))
    packed = PackedBatch.from_samples(samples)
    index = packed["index"]
    positions = torch.stack([index + 100 * k for k in range(kinds)])
    chosen = PackedBatch(packed.fields | {"position_ids": positions}, packed.cu_seqlens).select(rows)
    assert torch.equal(chosen["position_ids"], torch.stack([chosen["index"] + 100 * k for k in range(kinds)]))


def test_rows_of_documents_that_positions_tell_apart_are_refused():
    ids = torch.ones(2, 5, dtype=torch.int64)
    positions = torch.tensor([[0, 1, 2, 3, 4], [0, 1, 0, 1, 2]])
    with pytest.raises(BatchError, match="position_ids of row 1 begin again inside the row"):
        view({"input_ids": ids, "position_ids": positions})
    assert view({"input_ids": ids, "position_ids": positions, "attention_mask": torch.ones(2, 5)}).lengths == (5, 5)
    padding = torch.tensor([[0, 1, 2, 3, 4], [0, 1, 2, 0, 0]])  # positions of padding, in a batch that names none
    assert view({"input_ids": ids, "position_ids": padding}).lengths == (5, 5)
    assert view({"input_ids": ids, "position_ids": torch.zeros(2, 5)}).lengths == (5, 5)
