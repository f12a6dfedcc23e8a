"""Batches of chosen lengths in the format of a real one."""

import pytest
import torch

from lightning_dcp.batch import PackedBatch, packed_to_jagged, packed_to_padded
from lightning_dcp.batch.view import view
from lightning_dcp.calibration.samples import SampleSource
from lightning_dcp.errors import BatchError

LENGTHS = (5, 2, 3)


def packed():
    ids = torch.arange(1, 11).unsqueeze(0)
    labels = ids.clone()
    labels[0, 3] = -100
    return PackedBatch({"input_ids": ids, "labels": labels}, torch.tensor([0, 5, 7, 10]))


FORMATS = {"packed": lambda batch: batch, "padded": packed_to_padded, "jagged": packed_to_jagged}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("lengths", [(3,), (25, 1, 4), (4, 4)])
def test_batches_have_the_lengths_asked_for_and_real_tokens(name, lengths):
    made = SampleSource(FORMATS[name](packed())).batch(lengths)
    seen = view(made)
    seen.check()
    assert seen.lengths == lengths
    ids, labels = seen.flatten(made["input_ids"]), seen.flatten(made["labels"])
    assert torch.equal(labels, torch.where(ids == 4, -100, ids)), "what belongs to one token stays together"
    counts = torch.bincount(ids, minlength=11)[1:]
    assert counts.sum() == sum(lengths)
    assert counts.max() - counts.min() <= 1, "no token is left out or used more than others"
    assert type(made) is type(FORMATS[name](packed()))


@pytest.mark.parametrize("tokens", [1, 2, 3, 10, 97, 1000])
def test_every_sample_has_its_share_of_targets(tokens):
    """Half of the data are targets, and they come last: as after a prompt."""
    labels = torch.arange(tokens).unsqueeze(0)
    labels[0, : tokens // 2] = -100
    source = SampleSource(
        PackedBatch({"input_ids": torch.arange(tokens)[None], "labels": labels}, torch.tensor([0, tokens]))
    )
    batch = source.batch((8,) * 40)
    for part in batch.split(batch["labels"]):
        assert (part != -100).sum() >= 3


def test_one_entry_a_sample_is_repeated_and_the_rest_handed_on():
    batch = packed_to_padded(packed()) | {
        "reward": torch.tensor([0.5, 1.5, 2.5]),
        "names": ["a", "b", "c"],
        "temperature": torch.tensor(0.7),
    }
    made = SampleSource(batch).batch([2, 2, 2, 2])
    assert made["reward"].tolist() == [0.5, 1.5, 2.5, 0.5]
    assert made["names"] == ["a", "b", "c", "a"]
    assert made["temperature"] == torch.tensor(0.7)
    assert made["attention_mask"].shape == (4, 2)


def test_rows_without_a_mask_stay_without_one():
    batch = {"input_ids": torch.arange(8).view(2, 4)}
    assert set(SampleSource(batch).batch([6, 6])) == {"input_ids"}


def test_a_mapping_of_its_own_kind_stays_one():
    class Encoding(dict):
        pass

    made = SampleSource(Encoding(packed_to_padded(packed()))).batch([2, 7])
    assert type(made) is Encoding
    assert view(made).lengths == (2, 7)


def test_an_unknown_format_is_refused():
    with pytest.raises(BatchError, match="unknown batch format"):
        SampleSource([1, 2, 3])


@pytest.mark.parametrize(
    "batch",
    [
        {"input_ids": torch.ones(1, 5, dtype=torch.int64), "cu_seq_lens_q": torch.tensor([0, 2, 5], dtype=torch.int32)},
        {f"{kind}_input_ids": torch.ones(2, 5, dtype=torch.int64) for kind in ("chosen", "rejected")},
    ],
    ids=["flattened", "two sequences a sample"],
)
def test_formats_of_which_no_others_can_be_made_are_refused(batch: dict[str, torch.Tensor]) -> None:
    with pytest.raises(BatchError, match="measure with packed, padded or jagged batches"):
        SampleSource(batch)
