import pickle
from functools import partial

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_dcp.batch import PackedBatch, Segment, jagged_to_packed, padded_to_packed
from lightning_dcp.batch.view import view
from lightning_dcp.data import (
    COLLATORS,
    ByteTokenizer,
    Document,
    TokenDataset,
    collate_jagged,
    collate_packed,
    collate_padded,
    python_library_documents,
)
from lightning_dcp.errors import BatchError, DataError

SIZES = [3, 1, 9, 4, 30]


def text(index):
    return bytes(97 + (index + i) % 26 for i in range(SIZES[index]))


def make(max_length=12):
    return TokenDataset([Document(f"d{i}", n, partial(text, i)) for i, n in enumerate(SIZES)], max_length=max_length)


def test_items():
    item = make()[1]
    assert set(item) == {"input_ids", "labels", "index"}
    assert item["input_ids"].tolist() == [256, 98, 257]
    assert torch.equal(item["labels"], item["input_ids"])
    assert item["labels"].dtype == torch.int64
    assert item["labels"].data_ptr() != item["input_ids"].data_ptr()
    assert make()[-1]["index"] == len(SIZES) - 1
    with pytest.raises(IndexError):
        make()[len(SIZES)]


@pytest.mark.parametrize("max_length", [2, 5, 11, 12, 31, 32, 33])
def test_cut_and_lengths(max_length):
    dataset = make(max_length)
    for index, length in enumerate(dataset.lengths):
        ids = dataset[index]["input_ids"]
        assert ids.tolist() == ByteTokenizer().encode(text(index)).tolist()[:max_length]
        assert len(ids) == length
        assert ids.untyped_storage().nbytes() <= 8 * (max_length + 2)


def test_lengths_read_nothing():
    def fail():
        raise OSError("read")

    dataset = TokenDataset([Document("a", 5, fail), Document("b", 500, fail)], max_length=64)
    assert dataset.lengths == (7, 64)
    with pytest.raises(DataError, match="'a' cannot be read"):
        dataset[0]


def test_lengths_of_the_library_before_cutting():
    dataset = TokenDataset(python_library_documents(), max_length=10**9)
    assert min(dataset.lengths) < 60
    assert max(dataset.lengths) > 300_000
    longest = max(range(len(dataset)), key=dataset.lengths.__getitem__)
    assert len(dataset[longest]["input_ids"]) == dataset.lengths[longest]


def samples():
    dataset = make()
    return [dataset[i] for i in (4, 0, 2)]


def same(one, other):
    return (
        one.lengths == other.lengths
        and all(torch.equal(one[name], other[name]) for name in one)
        and set(one)
        == {
            "input_ids",
            "labels",
        }
        == set(other)
    )


def test_packed():
    batch = collate_packed(samples())
    assert isinstance(batch, PackedBatch)
    assert batch.sample_ids == (4, 0, 2)
    assert batch.lengths == (12, 5, 11)
    assert [part.tolist() for part in batch.split(batch.labels)] == [s["labels"].tolist() for s in samples()]


def test_padded():
    batch = collate_padded(samples())
    assert set(batch) == {"input_ids", "labels", "attention_mask"}
    assert batch["input_ids"].shape == (3, 12)
    assert batch["attention_mask"].dtype == torch.int64
    assert batch["attention_mask"].sum(1).tolist() == [12, 5, 11]
    assert batch["input_ids"][1, 5:].tolist() == [0] * 7
    assert batch["labels"][1, 5:].tolist() == [-100] * 7
    assert batch["labels"][1, :5].tolist() == samples()[1]["labels"].tolist()
    assert same(padded_to_packed(batch), collate_packed(samples()))


def test_jagged():
    batch = collate_jagged(samples())
    assert batch["input_ids"].layout == torch.jagged
    assert [row.tolist() for row in batch["labels"].unbind()] == [s["labels"].tolist() for s in samples()]
    assert same(jagged_to_packed(batch), collate_packed(samples()))


def test_samples_without_an_index_and_no_samples():
    assert collate_packed([{"input_ids": torch.arange(3)}, {"input_ids": torch.arange(1)}]).sample_ids == (0, 1)
    with pytest.raises(BatchError):
        collate_packed([])


def as_packed(batch):
    if isinstance(batch, PackedBatch):
        return batch
    return padded_to_packed(batch) if "attention_mask" in batch else jagged_to_packed(batch)


@pytest.mark.parametrize("name", ["packed", "padded", "jagged"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_through_data_loaders(name, num_workers):
    collate = pickle.loads(pickle.dumps(COLLATORS[name]))
    loader = DataLoader(make(), batch_size=2, collate_fn=collate, num_workers=num_workers)
    batches = list(loader)
    dataset = make()
    expected = [collate_packed([dataset[i] for i in group]) for group in ([0, 1], [2, 3], [4])]
    assert len(batches) == 3
    for batch, want in zip(batches, expected, strict=True):
        assert same(as_packed(batch), want)
        if name == "packed":
            assert batch.sample_ids == want.sample_ids
        if name == "jagged":  # the fields still share their structure after the workers' queue
            assert torch.equal((batch["input_ids"] - batch["labels"]).values(), torch.zeros(want.num_tokens))


def test_collators_cannot_be_changed():
    assert set(COLLATORS) == {"packed", "padded", "jagged"}
    with pytest.raises(TypeError):
        COLLATORS["other"] = collate_packed


@pytest.mark.parametrize("name", ["packed", "padded", "jagged"])
def test_segments_of_samples_reach_the_batch(name):
    segments = [[Segment(0, 2, "user"), Segment(2, 5, "tool", 2.0)], [Segment(1, 3, "assistant")], []]
    given = [sample | {"segments": parts} for sample, parts in zip(samples(), segments, strict=True)]
    batch = view(COLLATORS[name](given))
    assert batch.segments == tuple(map(tuple, segments))
    assert view(COLLATORS[name](samples())).segments is None
    del given[1]["segments"]
    assert view(COLLATORS[name](given)).segments == (tuple(segments[0]), (), ())
    given[0]["segments"] = torch.tensor([[0, 2]])
    with pytest.raises(BatchError, match=r"segments of sample [04] are a Tensor: give a list of segments"):
        view(COLLATORS[name](given)).check()
    given[0]["segments"] = [Segment(0, 99)]
    with pytest.raises(BatchError, match=r"sample [04] of 12 tokens"):
        view(COLLATORS[name](given)).check()
