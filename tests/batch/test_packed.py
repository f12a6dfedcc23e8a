import pickle

import pytest
import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision
from lightning.pytorch.plugins.precision.double import DoublePrecision
from torch.utils.data import DataLoader

from lightning_dcp.batch import PackedBatch
from lightning_dcp.data import collate_packed
from lightning_dcp.errors import BatchError
from tests.batch.formats import make_samples, same_batch
from tests.support.training import RaggedTokens

LENGTHS = (3, 1, 4)
CUDA = torch.cuda.is_available()


@pytest.fixture
def batch():
    return PackedBatch.from_samples(make_samples(LENGTHS), sample_ids=[70, 80, 90])


def fields(tokens, **more):
    return {"input_ids": torch.arange(tokens).unsqueeze(0), **more}


def boundaries(*ends):
    return torch.tensor(ends)


def test_shapes_lengths_and_boundaries(batch):
    assert batch.input_ids.shape == batch["labels"].shape == (1, 8)
    assert batch["vector"].shape == (1, 8, 3)
    assert batch.lengths == LENGTHS
    assert batch.max_seqlen == 4
    assert batch.num_tokens == 8
    assert len(batch) == 3
    assert batch.cu_seqlens.dtype == torch.int32
    assert batch.cu_seqlens.tolist() == [0, 3, 4, 8]
    assert batch.device == torch.device("cpu")


def test_samples_lie_one_after_another():
    samples = make_samples(LENGTHS)
    batch = PackedBatch.from_samples(samples)
    for name in samples[0]:
        assert torch.equal(batch[name][0], torch.cat([sample[name] for sample in samples]))
    assert batch.sample_ids == (0, 1, 2)


def test_fields_are_items_and_attributes(batch):
    assert batch.input_ids is batch["input_ids"]
    assert "labels" in batch
    assert "nothing" not in batch
    assert list(batch) == ["input_ids", "labels", "flag", "vector", "index"]
    with pytest.raises(AttributeError, match=r"no field 'nothing'; it has .*'input_ids'"):
        _ = batch.nothing
    assert not hasattr(batch, "nothing")


def test_the_mapping_given_is_not_kept():
    given = fields(3)
    batch = PackedBatch(given, boundaries(0, 3))
    given["more"] = torch.zeros(1, 3)
    assert "more" not in batch


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_boundaries_become_int32(dtype):
    assert PackedBatch(fields(3), boundaries(0, 1, 3).to(dtype)).cu_seqlens.dtype == torch.int32


def test_to_casts_fields_and_leaves_boundaries_int32(batch):
    cast = batch.to(torch.float64)
    assert {field.dtype for field in cast.fields.values()} == {torch.float64}
    assert cast.cu_seqlens.dtype == torch.int32
    assert cast.sample_ids == (70, 80, 90)
    assert batch.input_ids.dtype == torch.int64


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not CUDA, reason="no GPU"))])
def test_to_moves_fields_and_boundaries_together(batch, device):
    moved = batch.to(device, non_blocking=True)
    assert {field.device.type for field in moved.fields.values()} == {moved.cu_seqlens.device.type} == {device}
    assert moved.cu_seqlens.dtype == torch.int32
    assert moved.select([1]).cu_seqlens.device.type == device
    assert same_batch(moved.to("cpu"), batch)


def test_select_keeps_ids_and_takes_the_order_given(batch):
    chosen = batch.select([2, 0])
    assert chosen.lengths == (4, 3)
    assert chosen.sample_ids == (90, 70)
    assert chosen["index"].tolist() == [[4, 5, 6, 7, 0, 1, 2]]
    assert chosen["vector"].shape == (1, 7, 3)
    assert chosen.cu_seqlens.dtype == torch.int32
    assert chosen.select([1]).sample_ids == (70,)


def test_selecting_everything_changes_nothing(batch):
    assert same_batch(batch.select(range(3)), batch)


def test_only_per_token_tensors_are_split(batch):
    with pytest.raises(BatchError, match=r"shape \(3, 1, \d+\) is not per-token"):
        batch.split(torch.zeros(3, 1, batch.num_tokens))


def test_split_gives_one_tensor_a_sample(batch):
    for part, sample in zip(batch.split(batch["vector"]), make_samples(LENGTHS), strict=True):
        assert torch.equal(part, sample["vector"])


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: PackedBatch(fields(3), torch.tensor([[0, 3]])), "one-dimensional"),
        (lambda: PackedBatch(fields(3), torch.tensor(3)), "one-dimensional"),
        (lambda: PackedBatch(fields(3), boundaries(0)), "at least one sample"),
        (lambda: PackedBatch(fields(3), torch.tensor([], dtype=torch.int32)), "at least one sample"),
        (lambda: PackedBatch(fields(3), boundaries(1, 3)), "start at 0"),
        (lambda: PackedBatch({}, boundaries(0, 3)), "at least one per-token field"),
        (lambda: PackedBatch(fields(3), boundaries(0, 3), [1, 2]), "2 sample_ids for 1 samples"),
        (lambda: PackedBatch(fields(3), boundaries(0, 4, 3), [5, 6]), r"falls at sample 6 \(length -1\)"),
        (lambda: PackedBatch(fields(3), boundaries(0, 4)), r"'input_ids' has shape \(1, 3\).*\[1, 4, ...\]"),
        (lambda: PackedBatch(fields(3, more=torch.zeros(3)), boundaries(0, 3)), r"'more' has shape \(3,\)"),
        (lambda: PackedBatch(fields(3, more=torch.zeros(2, 3)), boundaries(0, 3)), r"'more' has shape \(2, 3\)"),
        (lambda: PackedBatch.from_samples([]), "at least one sample"),
        (lambda: PackedBatch.from_samples([{}]), "same fields"),
        (lambda: PackedBatch.from_samples([{"a": torch.ones(2)}, {"b": torch.ones(2)}]), "same fields"),
        (
            lambda: PackedBatch.from_samples([{"a": torch.ones(2)}, {"a": torch.ones(2), "b": torch.ones(2)}]),
            "same fields",
        ),
        (
            lambda: PackedBatch.from_samples([{"a": torch.ones(2), "b": torch.ones(1)}]),
            r"'b' has shape \(1, 1\).*\[1, 2, ...\]",
        ),
        (lambda: PackedBatch(fields(3), boundaries(0, 3)).select([]), "at least one sample"),
    ],
)
def test_what_cannot_be_packed_is_refused(build, message):
    with pytest.raises(BatchError, match=message):
        build()


def precision_plugins():
    return [
        HalfPrecision("bf16-true"),
        HalfPrecision("16-true"),
        DoublePrecision(),
        MixedPrecision("bf16-mixed", "cpu"),
    ]


@pytest.mark.parametrize("plugin", precision_plugins(), ids=lambda plugin: plugin.precision)
def test_true_precision_leaves_the_batch_as_it_is(plugin, batch):
    kept = plugin.convert_input(batch)
    assert kept is batch
    assert kept["vector"].dtype == torch.float32
    assert kept["input_ids"].dtype == torch.int64
    assert plugin.convert_input({"vector": batch["vector"]}) is not None  # a plain dict is walked, and may be cast


class Moved(PackedBatch):
    """Keeps what ``to`` was asked for."""

    def to(self, *args, **kwargs):
        moved = super().to(*args, **kwargs)
        moved.asked = (args, kwargs)
        return moved


def test_lightning_moves_the_batch_by_its_own_method(batch):
    batch.__class__ = Moved
    moved = move_data_to_device({"inner": [batch]}, torch.device("cpu"))["inner"][0]
    assert moved.asked == ((torch.device("cpu"),), {})
    assert same_batch(moved, batch)


def test_pickling_keeps_everything(batch):
    assert same_batch(pickle.loads(pickle.dumps(batch)), batch)


def test_worker_processes_hand_the_batch_over_whole():
    lengths = [3, 1, 4, 1, 5]

    def batches(workers):
        return list(DataLoader(RaggedTokens(lengths), batch_size=2, collate_fn=collate_packed, num_workers=workers))

    here, there = batches(0), batches(2)
    assert [batch.sample_ids for batch in there] == [(0, 1), (2, 3), (4,)]
    assert all(same_batch(ours, expected) for ours, expected in zip(there, here, strict=True))
