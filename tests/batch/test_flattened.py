"""Mappings whose samples lie one after another in one row, as Transformers' collator makes them."""

from collections import UserDict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dcp.batch.labels import shifted_labels
from lightning_dcp.batch.view import FlattenedView, PaddedView, view
from lightning_dcp.errors import BatchError
from tests.batch.formats import make_samples

LENGTHS = [3, 1, 4]
WAYS = {
    "positions": {},
    "lengths": {"return_flash_attn_kwargs": True},
    "lengths only": {"return_flash_attn_kwargs": True, "return_position_ids": False},
    "numbers": {"return_seq_idx": True, "return_position_ids": False},
    "all": {"return_flash_attn_kwargs": True, "return_seq_idx": True},
}
every_way = pytest.mark.parametrize("way", WAYS)


def collated(samples, way="lengths"):
    """What DataCollatorWithFlattening makes of these samples."""
    lengths = [len(sample["input_ids"]) for sample in samples]
    options = WAYS[way]
    batch = {name: torch.cat([sample[name] for sample in samples]).unsqueeze(0) for name in ("input_ids", "labels")}
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    batch["labels"][0, ends[:-1].long()] = -100
    if options.get("return_position_ids", True):
        batch["position_ids"] = torch.cat([torch.arange(n) for n in lengths]).unsqueeze(0)
    if "return_seq_idx" in options:
        batch["seq_idx"] = torch.tensor([[i for i, n in enumerate(lengths) for _ in range(n)]], dtype=torch.int32)
    if "return_flash_attn_kwargs" in options:
        batch |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends.clone()}
        batch |= {"max_length_q": max(lengths), "max_length_k": max(lengths)}
    return batch


@pytest.mark.parametrize("way", WAYS)
def test_this_is_what_transformers_makes(way):
    import transformers

    samples = make_samples(LENGTHS)
    features = [{name: sample[name].tolist() for name in ("input_ids", "labels")} for sample in samples]
    theirs = transformers.DataCollatorWithFlattening(**WAYS[way])(features)
    ours = collated(samples, way)
    assert same({name: theirs[name] for name in ours}, ours)
    assert set(theirs) - set(ours) <= {"position_ids"}  # releases before 5 always have them


def same(one, other):
    return set(one) == set(other) and all(_equal(one[name], other[name]) for name in other)


def _equal(one, other):
    if isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and one == other


@every_way
@given(st.lists(st.integers(1, 5), min_size=2, max_size=5), st.randoms(use_true_random=False))
@settings(max_examples=20, deadline=None)
def test_selected_samples_are_what_the_collator_would_make_of_them(way, lengths, random):
    samples = make_samples(lengths)
    rows = random.sample(range(len(lengths)), random.randint(1, len(lengths)))
    seen = view(collated(samples, way))
    assert type(seen) is FlattenedView
    assert seen.packed
    assert seen.lengths == tuple(lengths)
    chosen = seen.select(rows)
    assert same(chosen, collated([samples[row] for row in rows], way))
    assert view(chosen).lengths == tuple(lengths[row] for row in rows)


@every_way
def test_targets_never_cross_samples(way):
    samples = [s | {"labels": s["input_ids"]} for s in make_samples(LENGTHS)]
    batch = collated(samples, way)
    ids = [s["input_ids"].tolist() for s in samples]
    assert batch["labels"].tolist()[0][3:5] == [-100, -100]  # the collator's mark of first tokens
    assert shifted_labels(batch).tolist() == [[*ids[0][1:], -100, -100, *ids[2][1:], -100]]
    assert view(batch).target_counts() == (2, 0, 3)


def test_tensors_of_the_row_hold_the_samples_whatever_the_mask():
    batch = collated(make_samples(LENGTHS))
    seen = view(batch)
    for mask in (None, torch.ones(1, 8), torch.zeros(1, 8), torch.zeros(1, 1, 8, 8)):
        assert seen.sequences(batch["input_ids"], mask) is seen.tokens
    assert seen.sequences(torch.zeros(1, 8, 4)).lengths == (3, 1, 4)
    assert seen.sequences(batch["input_ids"][:, :-1]) is None
    assert seen.sequences(torch.zeros(3, 4)) is None


def test_fields_that_say_where_samples_lie_are_made_anew():
    chosen = view(collated(make_samples(LENGTHS), "all")).select([1, 0])
    assert chosen["cu_seq_lens_q"].tolist() == chosen["cu_seq_lens_k"].tolist() == [0, 1, 4]
    assert chosen["cu_seq_lens_q"].dtype == torch.int32
    assert chosen["max_length_q"] == chosen["max_length_k"] == 3
    assert chosen["seq_idx"].tolist() == [[0, 1, 1, 1]]


class Encoding(UserDict):
    """A mapping of another type."""


@pytest.mark.parametrize("kind", [dict, Encoding])
def test_other_fields_follow_their_samples(kind):
    index = torch.arange(8)
    batch = kind(
        {
            "input_ids": index.unsqueeze(0),
            "cu_seqlens": torch.tensor([0, 3, 4, 8]),
            "max_seqlen": torch.tensor(4),
            "position_ids": torch.stack([index, index + 10, index + 20]).unsqueeze(1),
            "attention_mask": torch.ones(1, 8),
            "vector": index.view(1, 8, 1) * torch.ones(3),
            "flag": (index > 3).unsqueeze(0),
            "reward": torch.tensor([0.5, 1.5, 2.5]),
            "names": ["a", "b", "c"],
            "sample_ids": [7, 8, 9],
            "kind": "x",
        }
    )
    seen = view(batch)
    assert seen.sample_ids == (7, 8, 9)
    chosen = seen.select([2, 1])
    places = [4, 5, 6, 7, 3]
    assert type(chosen) is kind
    assert chosen["input_ids"].tolist() == [places]
    assert chosen["cu_seqlens"].tolist() == [0, 4, 5]
    assert chosen["cu_seqlens"].dtype == torch.int64
    assert chosen["max_seqlen"].tolist() == 4
    assert chosen["position_ids"].tolist() == [[[p + k for p in places]] for k in (0, 10, 20)]
    assert chosen["attention_mask"].shape == (1, 5)
    assert chosen["vector"].tolist() == [[[p] * 3 for p in places]]
    assert chosen["flag"].tolist() == [[True] * 4 + [False]]
    assert chosen["reward"].tolist() == [2.5, 1.5]
    assert chosen["names"] == ["c", "b"]
    assert chosen["sample_ids"] == [9, 8]
    assert chosen["kind"] == "x"
    assert view(chosen).lengths == (4, 1)


def test_cumulative_lengths_win_over_positions_and_masks():
    batch = collated(make_samples(LENGTHS), "positions")
    batch |= {"cu_seqlens": torch.tensor([0, 2, 8]), "attention_mask": torch.zeros(1, 8)}
    assert view(batch).lengths == (2, 6)


@pytest.mark.parametrize(
    ("positions", "lengths"),
    [
        ([0, 1, 2, 0, 1], (3, 2)),
        ([0, 0, 0, 1, 0], (1, 1, 2, 1)),
        ([2, 3, 4, 2, 3], (3, 2)),  # RoBERTa counts from 2
    ],
)
def test_positions_that_begin_again_begin_a_sample(positions, lengths):
    batch = {"input_ids": torch.ones(1, 5, dtype=torch.int64), "position_ids": torch.tensor([positions])}
    assert view(batch).lengths == lengths
    assert view(batch | {"attention_mask": torch.ones(1, 5, dtype=torch.int64)}).lengths == lengths


@pytest.mark.parametrize(
    "fields",
    [
        {"position_ids": torch.tensor([[0, 1, 2, 3, 4]])},
        {"position_ids": torch.tensor([[3, 4, 5, 6, 7]])},
        {"position_ids": torch.tensor([[0, 1, 5, 0, 1]])},  # no count
        {"position_ids": torch.tensor([[[0, 1, 0, 1, 2]]] * 3)},
        {"position_ids": torch.tensor([[1, 1, 0, 1, 2]]), "attention_mask": torch.tensor([[0, 0, 1, 1, 1]])},
        {"position_ids": torch.tensor([[0, 0, 0, 1, 2]]), "attention_mask": torch.tensor([[0, 0, 1, 1, 1]])},
        {},
    ],
    ids=str,
)
def test_other_rows_are_one_sample(fields):
    seen = view({"input_ids": torch.ones(1, 5, dtype=torch.int64)} | fields)
    assert type(seen) is PaddedView
    assert seen.lengths == (3,) if "attention_mask" in fields else (5,)


IDS = torch.ones(1, 5, dtype=torch.int64)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"input_ids": IDS.expand(2, 5), "cu_seqlens": torch.tensor([0, 5])}, r"input_ids has shape \(2, 5\)"),
        ({"input_ids": IDS, "cu_seqlens": torch.tensor([0, 2, 4])}, "must rise from 0 to the 5 tokens"),
        ({"input_ids": IDS, "cu_seq_lens_q": torch.tensor([1, 5])}, "cu_seq_lens_q must rise from 0"),
        ({"input_ids": IDS, "cu_seqlens": torch.tensor([0, 3, 2, 5])}, r"found \[0, 3, 2, 5\]"),
        ({"input_ids": IDS, "cu_seqlens": torch.tensor([[0, 5]])}, "must hold the cumulative lengths"),
        ({"input_ids": IDS, "cu_seqlens": torch.tensor([0.0, 5.0])}, "must hold the cumulative lengths"),
        ({"input_ids": IDS, "cu_seqlens": None}, "must hold the cumulative lengths"),
        (
            {"input_ids": IDS, "cu_seq_lens_q": torch.tensor([0, 2, 5]), "cu_seq_lens_k": torch.tensor([0, 3, 5])},
            "cu_seq_lens_q and cu_seq_lens_k differ",
        ),
        (
            {"input_ids": IDS, "cu_seqlens": torch.tensor([0, 5]), "cu_seqlens_q_padded": torch.tensor([0, 8])},
            "'cu_seqlens_q_padded'.*cannot be cut",
        ),
        (
            {"input_ids": IDS, "cu_seqlens": torch.tensor([0, 5]), "attention_mask": torch.ones(1, 1, 5, 5)},
            r"attention_mask of a flattened batch must be \[1, 5, ...\]",
        ),
    ],
)
def test_boundaries_that_cannot_be_read_are_refused(batch, message):
    with pytest.raises(BatchError, match=message):
        view(batch)


def test_an_empty_sample_is_named():
    batch = {"input_ids": IDS, "cu_seqlens": torch.tensor([0, 2, 2, 5])}
    with pytest.raises(BatchError, match=r"empty sample\(s\) \[1\]"):
        view(batch).check()
