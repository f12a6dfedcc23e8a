import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dcp.batch import (
    PackedBatch,
    jagged_to_packed,
    packed_to_jagged,
    packed_to_padded,
    padded_to_packed,
)
from lightning_dcp.batch.view import view
from lightning_dcp.errors import BatchError
from tests.batch.formats import make_samples, same_batch

LENGTHS = st.lists(st.integers(0, 6), min_size=1, max_size=5)


@given(LENGTHS, st.sampled_from(["left", "right"]), st.integers(0, 3), st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_packed_padded_packed_loses_nothing(lengths, side, columns, seed):
    packed = PackedBatch.from_samples(make_samples(lengths, seed=seed), range(10, 10 + len(lengths)))
    padded = packed_to_padded(packed, padding_side=side, length=packed.max_seqlen + columns)
    assert padded["vector"].shape == (len(lengths), packed.max_seqlen + columns, 3)
    assert same_batch(padded_to_packed(padded, packed.sample_ids), packed)


@given(LENGTHS, st.sampled_from(["left", "right"]), st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_padded_packed_padded_loses_nothing(lengths, side, seed):
    padded = packed_to_padded(PackedBatch.from_samples(make_samples(lengths, seed=seed)), padding_side=side)
    width = padded["input_ids"].shape[1]
    assert same_batch(packed_to_padded(padded_to_packed(padded), padding_side=side, length=width), padded)


@given(LENGTHS, st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_packed_jagged_packed_loses_nothing(lengths, seed):
    packed = PackedBatch.from_samples(make_samples(lengths, seed=seed))
    jagged = packed_to_jagged(packed)
    assert same_batch(jagged_to_packed(jagged), packed)
    assert same_batch(packed_to_jagged(jagged_to_packed(jagged)), jagged)


def test_jagged_fields_hold_each_sample():
    samples = make_samples([3, 1])
    for name, field in packed_to_jagged(PackedBatch.from_samples(samples)).items():
        assert all(torch.equal(part, sample[name]) for part, sample in zip(field.unbind(), samples, strict=True))


@pytest.mark.parametrize(
    ("side", "ids", "mask", "labels"),
    [
        ("right", [[5, 6, 7], [8, 0, 0]], [[1, 1, 1], [1, 0, 0]], [[5, 6, 7], [8, -100, -100]]),
        ("left", [[5, 6, 7], [0, 0, 8]], [[1, 1, 1], [0, 0, 1]], [[5, 6, 7], [-100, -100, 8]]),
    ],
)
def test_padding_is_zero_and_no_target(side, ids, mask, labels):
    tokens = torch.tensor([[5, 6, 7, 8]])
    batch = PackedBatch({"input_ids": tokens, "labels": tokens, "shift_labels": tokens}, torch.tensor([0, 3, 4]))
    padded = packed_to_padded(batch, padding_side=side)
    assert padded["input_ids"].tolist() == ids
    assert padded["attention_mask"].tolist() == mask
    assert padded["labels"].tolist() == padded["shift_labels"].tolist() == labels


def test_padding_between_samples_is_left_out():
    ids = torch.tensor([[1, 1, 1, 0], [2, 2, 0, 0]])
    batch = {"input_ids": ids, "attention_mask": (ids > 0).long(), "place": torch.arange(8).view(2, 4)}
    packed = padded_to_packed(batch)
    assert packed["place"].tolist() == [[0, 1, 2, 4, 5]]
    assert packed.cu_seqlens.tolist() == [0, 3, 5]


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.int64, torch.float32])
def test_a_mask_of_any_type_of_zeros_and_ones(dtype):
    mask = torch.tensor([[1, 1, 0], [0, 1, 1]]).to(dtype)
    assert padded_to_packed({"input_ids": torch.arange(6).view(2, 3), "attention_mask": mask}).lengths == (2, 2)


def test_without_a_mask_every_token_is_real():
    packed = padded_to_packed({"input_ids": torch.arange(6).view(2, 3)})
    assert packed.input_ids.tolist() == [[0, 1, 2, 3, 4, 5]]
    assert packed.lengths == (3, 3)


def test_a_row_without_real_tokens_is_an_empty_sample():
    mask = torch.tensor([[1, 1], [0, 0], [1, 0]])
    packed = padded_to_packed({"input_ids": torch.arange(6).view(3, 2), "attention_mask": mask})
    assert packed.lengths == (2, 0, 1)
    assert packed.input_ids.tolist() == [[0, 1, 4]]
    with pytest.raises(BatchError, match=r"empty sample\(s\) \[1\]"):
        view(packed).check()


IDS = torch.arange(1, 7).view(2, 3)
MASK = torch.ones(2, 3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"input_ids": IDS, "attention_mask": torch.tensor([[1, 1, 1], [1, 0, 1]])}, "row 1 has holes"),
        (
            {"input_ids": IDS, "attention_mask": torch.ones(2, 4)},
            r"attention_mask has shape \(2, 4\), input_ids \(2, 3\)",
        ),
        ({"input_ids": IDS, "attention_mask": torch.ones(2, 1, 3, 3)}, r"shape \(2, 1, 3, 3\)"),
        ({"input_ids": IDS, "attention_mask": [[1, 1, 1]]}, "has shape list"),
        (
            {"input_ids": IDS, "attention_mask": torch.tensor([[1, 1, 2], [1, 0, 0]])},
            r"holds \[0, 1, 2\]: expected 0 and 1",
        ),
        ({"input_ids": IDS, "attention_mask": torch.tensor([[0.0, 0, -1e9]] * 2)}, "expected 0 and 1"),
        ({"attention_mask": MASK}, "needs input_ids"),
        ({"input_ids": torch.arange(3)}, r"needs input_ids of shape \[B, T\]"),
        ({"input_ids": IDS, "attention_mask": MASK, "score": torch.ones(2)}, "'score' is not per-token"),
        ({"input_ids": IDS, "attention_mask": MASK, "names": ["a", "b"]}, "'names' is not per-token"),
    ],
)
def test_a_padded_batch_that_breaks_the_rules_is_refused(batch, message):
    with pytest.raises(BatchError, match=message):
        padded_to_packed(batch)


def test_positions_with_an_axis_in_front_keep_it():
    packed = PackedBatch.from_samples(make_samples([3, 1]))
    positions = torch.tensor([[[0, 1, 2, 0]], [[5, 6, 7, 5]]])
    packed = PackedBatch(packed.fields | {"position_ids": positions}, packed.cu_seqlens)
    padded = packed_to_padded(packed, padding_side="left")
    assert padded["position_ids"].tolist() == [[[0, 1, 2], [0, 0, 0]], [[5, 6, 7], [0, 0, 5]]]
    assert same_batch(padded_to_packed(padded), packed)
    with pytest.raises(BatchError, match=r"position_ids of shape \(2, 1, 4\) has no jagged form"):
        packed_to_jagged(packed)


def test_padding_cannot_be_shorter_than_the_longest_sample():
    with pytest.raises(BatchError, match=r"length=2 is shorter than the longest sample \(3 tokens\)"):
        packed_to_padded(PackedBatch.from_samples(make_samples([3, 1])), length=2)


def nested(*lengths, **options):
    return torch.nested.nested_tensor([torch.ones(n, 2) for n in lengths], layout=torch.jagged, **options)


def with_gaps():
    return torch.nested.nested_tensor_from_jagged(
        torch.arange(6), torch.tensor([0, 3, 6]), lengths=torch.tensor([2, 3])
    )


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({}, "at least one field"),
        ({"input_ids": nested(2, 3), "score": torch.ones(2)}, "'score' is not a jagged nested tensor"),
        ({"input_ids": nested(2, 3), "more": nested(3, 2)}, "'more' has other sample lengths"),
        ({"input_ids": with_gaps()}, "without gaps"),
        ({"input_ids": nested(2, 3).transpose(1, 2)}, r"\[B, \(T\), ...\]"),
    ],
)
def test_a_jagged_batch_that_breaks_the_rules_is_refused(batch, message):
    with pytest.raises(BatchError, match=message):
        jagged_to_packed(batch)
    if len(batch) and "score" not in batch:
        with pytest.raises(BatchError, match=message.replace("fields before it", "first")):
            view(batch)
