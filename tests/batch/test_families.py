"""Samples of several sequences each: chosen and rejected answers, prompts."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dcp.batch import PackedBatch, packed_to_jagged, packed_to_padded
from lightning_dcp.batch.labels import shifted_labels
from lightning_dcp.batch.view import FamiliesView, PaddedView, view
from lightning_dcp.errors import BatchError
from tests.batch.formats import make_samples, same_batch

CHOSEN, REJECTED = [4, 2, 5], [1, 3, 2]
KEPT = ("input_ids", "labels", "attention_mask", "vector")


def family(prefix, lengths, fmt="padded", *, width=None, keep=KEPT, seed=0):
    packed = PackedBatch.from_samples(make_samples(lengths, seed=seed))
    if fmt == "jagged":
        fields = packed_to_jagged(packed)
    else:
        side = "left" if fmt == "padded-left" else "right"
        fields = packed_to_padded(packed, padding_side=side, length=width)
    return {prefix + name: value for name, value in fields.items() if name in keep}


def pairs(fmt="padded", chosen=CHOSEN, rejected=REJECTED, **options):
    return family("chosen_", chosen, fmt, **options) | family("rejected_", rejected, fmt, seed=1, **options)


every_format = pytest.mark.parametrize("fmt", ["padded", "padded-left", "jagged"])


@every_format
def test_a_sample_has_the_tokens_of_all_its_sequences(fmt):
    seen = view(pairs(fmt))
    assert type(seen) is FamiliesView
    assert seen.lengths == (5, 5, 7)
    assert seen.sample_ids == (0, 1, 2)
    assert seen.tokens is None
    assert not seen.packed
    seen.check()


PAIRS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)).filter(any), min_size=1, max_size=5)


@every_format
@given(PAIRS, st.randoms(use_true_random=False))
@settings(max_examples=25, deadline=None)
def test_selected_samples_are_the_rows_of_every_family(fmt, lengths, random):
    chosen, rejected = zip(*lengths, strict=True)
    rows = random.sample(range(len(lengths)), random.randint(1, len(lengths)))
    seen = view(pairs(fmt, chosen, rejected))
    seen.check()
    cut = seen.select(rows)
    assert view(cut).lengths == tuple(sum(lengths[row]) for row in rows)
    assert view(cut).target_counts() == tuple(seen.target_counts()[row] for row in rows)
    for prefix, seed, of in (("chosen_", 0, chosen), ("rejected_", 1, rejected)):
        ours = view(cut).families[prefix]
        whole = make_samples(of, seed=seed)
        for name in ("input_ids", "labels", "vector"):
            expected = torch.cat([whole[row][name] for row in rows])
            assert torch.equal(ours.flatten(ours.batch[name]), expected)


@pytest.mark.parametrize("fmt", ["padded", "padded-left"])
def test_columns_that_are_padding_in_all_rows_are_cut_in_each_family(fmt):
    cut = view(pairs(fmt)).select([1, 0])
    right = fmt == "padded"
    assert cut["chosen_input_ids"].shape == cut["chosen_labels"].shape == (2, 4 if right else 5)
    assert cut["rejected_input_ids"].shape == (2, 3)
    assert cut["rejected_vector"].shape == (2, 3, 3)


def test_families_of_one_width_can_still_be_joined():
    cut = view(pairs(width=9)).select([0, 1])
    assert cut["chosen_input_ids"].shape == cut["rejected_input_ids"].shape == (2, 4)
    joined = torch.cat([cut["chosen_input_ids"], cut["rejected_input_ids"]])
    mask = torch.cat([cut["chosen_attention_mask"], cut["rejected_attention_mask"]])
    assert view(cut).sequences(joined, mask).lengths == (4, 2, 1, 3)
    assert view(cut).sequences(joined).lengths == (4, 4, 4, 4)


def test_a_family_whose_rows_are_all_empty_keeps_one_column():
    cut = view(pairs(chosen=[2, 3], rejected=[0, 4])).select([0])
    assert cut["rejected_input_ids"].shape == (1, 1)
    assert cut["rejected_attention_mask"].tolist() == [[0]]
    assert view(cut).lengths == (2,)


def test_other_fields_follow_their_samples():
    batch = pairs() | {
        "ref_chosen_logps": torch.tensor([1.0, 2.0, 3.0]),
        "chosen_score": torch.tensor([4.0, 5.0, 6.0]),
        "chosen_position_ids": torch.arange(15).view(3, 5).expand(2, 3, 5),
        "prompt": ["a", "b", "c"],
        "prompt_parts": torch.nested.nested_tensor([torch.ones(n) * n for n in (1, 2, 3)], layout=torch.jagged),
        "beta": torch.tensor(0.1),
        "sample_ids": torch.tensor([5, 6, 7]),
    }
    seen = view(batch)
    assert seen.sample_ids == (5, 6, 7)
    cut = seen.select([1, 0])
    assert list(cut) == list(batch)
    assert cut["ref_chosen_logps"].tolist() == [2.0, 1.0]
    assert cut["chosen_score"].tolist() == [5.0, 4.0]
    assert cut["chosen_position_ids"].tolist() == [[[5, 6, 7, 8], [0, 1, 2, 3]]] * 2
    assert cut["prompt"] == ["b", "a"]
    assert [part.tolist() for part in cut["prompt_parts"].unbind()] == [[2.0, 2.0], [1.0]]
    assert cut["beta"] is batch["beta"]


class Named(dict):
    """A mapping of another type."""


def test_a_mapping_keeps_its_type():
    assert type(view(Named(pairs())).select([1])) is Named


def test_three_families_and_the_longest_prefix_of_a_name():
    batch = pairs() | family("prompt_", [2, 2, 2], "padded-left") | family("prompt_image_", [1, 1, 1], "jagged")
    seen = view(batch)
    assert set(seen.families) == {"chosen_", "rejected_", "prompt_", "prompt_image_"}
    assert seen.lengths == (8, 8, 10)
    assert set(seen.families["prompt_"].batch) == set(KEPT)


def test_input_ids_without_prefix_make_a_batch_of_one_sequence_a_sample():
    batch = family("", CHOSEN) | family("decoder_", REJECTED)
    assert type(view(batch)) is PaddedView
    assert view(batch).lengths == tuple(CHOSEN)


def test_flattened_families_have_a_sample_in_each():
    batch = {}
    for prefix, lengths in (("chosen_", CHOSEN), ("rejected_", REJECTED)):
        batch[f"{prefix}input_ids"] = torch.arange(sum(lengths)).unsqueeze(0)
        batch[f"{prefix}cu_seqlens"] = torch.tensor([0, *lengths]).cumsum(0)
    seen = view(batch)
    assert seen.lengths == (5, 5, 7)
    cut = seen.select([2, 0])
    assert cut["chosen_input_ids"].tolist() == [[6, 7, 8, 9, 10, 0, 1, 2, 3]]
    assert cut["rejected_cu_seqlens"].tolist() == [0, 2, 3]


@every_format
def test_the_fingerprint_covers_every_family(fmt):
    fingerprint = view(pairs(fmt)).fingerprint()
    assert view(pairs(fmt)).fingerprint() == fingerprint
    assert (
        view(family("chosen_", CHOSEN, fmt) | family("rejected_", REJECTED, fmt, seed=2)).fingerprint() != fingerprint
    )


# ------------------------------------------------------------------ a call's tensors


@every_format
def test_a_familys_own_tensors_hold_its_sequences(fmt):
    batch = pairs(fmt)
    seen = view(batch)
    for prefix, lengths in (("chosen_", CHOSEN), ("rejected_", REJECTED)):
        for name in ("input_ids", "vector"):
            assert seen.sequences(batch[prefix + name]).lengths == tuple(lengths)


@pytest.mark.parametrize("alias", [lambda ids: ids, lambda ids: ids.view_as(ids), lambda ids: ids.detach()])
def test_families_of_one_shape_are_told_apart_by_the_tensor_itself(alias):
    batch = pairs(width=6)
    seen = view(batch)
    for prefix, lengths in (("chosen_", CHOSEN), ("rejected_", REJECTED)):
        ids = alias(batch[prefix + "input_ids"])
        assert seen.sequences(ids).lengths == tuple(lengths)
        assert seen.sequences(ids, torch.ones(3, 6)).lengths == tuple(lengths)  # ones change nothing
        assert seen.sequences(ids, batch[prefix + "attention_mask"]).lengths == tuple(lengths)


def test_a_copy_is_known_by_its_shape_or_its_mask():
    batch = pairs()
    seen = view(batch)
    assert seen.sequences(batch["rejected_input_ids"].clone()).lengths == tuple(REJECTED)
    embedded = torch.zeros(3, 5, 8)
    assert seen.sequences(embedded).lengths == tuple(CHOSEN)
    assert seen.sequences(embedded, batch["chosen_attention_mask"]).lengths == tuple(CHOSEN)
    # a mask that comes with a tensor of the call's own making is meant, ones included
    assert seen.sequences(embedded, torch.ones(3, 5)).lengths == (5, 5, 5)


def test_a_copy_of_several_familys_shape_needs_a_mask():
    batch = pairs(width=6)
    seen = view(batch)
    copy = batch["chosen_input_ids"].clone()
    with pytest.raises(BatchError, match=r"chosen_input_ids and rejected_input_ids have.*pass attention_mask"):
        seen.sequences(copy)
    assert seen.sequences(copy, batch["chosen_attention_mask"]).lengths == tuple(CHOSEN)
    assert seen.sequences(copy, torch.ones(3, 6)).lengths == (6, 6, 6)


def test_a_copy_of_a_shape_whose_families_agree_needs_none():
    full = view(pairs(chosen=[4, 4], rejected=[4, 4]))
    assert full.sequences(torch.zeros(2, 4)).lengths == (4, 4)
    jagged = view(pairs("jagged", [1, 2], [1, 2]))
    other = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)
    assert jagged.sequences(other).lengths == (1, 2)


def test_prompts_with_answers_are_read_by_their_mask():
    """As TRL joins them: left-padded prompts before right-padded answers."""
    batch = family("prompt_", [1, 2, 1], "padded-left") | pairs()
    ids = torch.cat([batch["prompt_input_ids"], batch["chosen_input_ids"]], 1)
    mask = torch.cat([batch["prompt_attention_mask"], batch["chosen_attention_mask"]], 1)
    call = view(batch).sequences(ids, mask)
    assert call.lengths == (5, 4, 6)
    assert torch.equal(call.flatten(ids), ids[mask.bool()])


def test_what_holds_no_tokens_is_none():
    seen = view(pairs())
    assert seen.sequences(torch.zeros(3)) is None
    assert seen.sequences(torch.tensor(0.5)) is None


# ------------------------------------------------------------------ targets


@every_format
def test_targets_of_a_sample_are_those_of_all_its_sequences(fmt):
    counts = [0, 0, 0]
    for seed, lengths in ((0, CHOSEN), (1, REJECTED)):
        for row, sample in enumerate(make_samples(lengths, seed=seed)):
            counts[row] += sum(label != -100 for label in sample["labels"].tolist()[1:])
    assert view(pairs(fmt)).target_counts() == tuple(counts)
    assert view(pairs(fmt, keep=("input_ids", "attention_mask"))).target_counts() == (3, 3, 5)


def test_families_may_say_their_targets_in_different_ways():
    mask = torch.tensor([[1, 0, 0], [0, 1, 1], [1, 1, 0]])
    batch = family("chosen_", CHOSEN, keep=("input_ids", "attention_mask")) | family("rejected_", REJECTED)
    del batch["rejected_labels"]
    shifted = torch.ones(3, 5, dtype=torch.int64).masked_fill(batch["chosen_attention_mask"] == 0, -100)
    batch |= {"rejected_loss_mask": mask, "chosen_shift_labels": shifted}
    assert view(batch).target_counts() == (5, 4, 7)


def test_one_label_a_sample_is_one_target():
    batch = pairs(keep=("input_ids", "attention_mask")) | {"labels": torch.tensor([1, -100, 0])}
    assert view(batch).target_counts() == (1, 0, 1)
    with pytest.raises(BatchError, match="labels, one a sample, and chosen_labels"):
        view(pairs() | {"labels": torch.tensor([1, -100, 0])}).target_counts()


def test_shifted_labels_of_several_sequences_are_those_of_one():
    batch = pairs()
    seen = view(batch).families["rejected_"]
    assert torch.equal(shifted_labels(seen.batch), seen.tokens.shifted(batch["rejected_labels"]))
    with pytest.raises(BatchError, match="several sequences each"):
        shifted_labels(pairs(keep=("input_ids",)) | {"labels": torch.ones(3)})


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"rejected_input_ids": torch.ones(2, 3), "rejected_attention_mask": torch.ones(2, 3)},
            "'rejected_input_ids': 2",
        ),
        ({"chosen_attention_mask": torch.ones(3, 9)}, r"in the fields chosen_\*: attention_mask has shape \(3, 9\)"),
        ({"attention_mask": torch.ones(3, 5)}, "name it chosen_attention_mask or rejected_attention_mask"),
        ({"labels": torch.ones(3, 5)}, "labels does not say which tokens it is for"),
        ({"loss_mask": torch.ones(3, 5)}, "loss_mask does not say"),
    ],
)
def test_a_batch_that_breaks_the_rules_is_refused(change, message):
    with pytest.raises(BatchError, match=message):
        view(pairs() | change)


def test_a_sample_without_any_token_is_named():
    with pytest.raises(BatchError, match=r"empty sample\(s\) \[1\]"):
        view(pairs(chosen=[2, 0, 1], rejected=[0, 0, 3])).check()


def test_a_family_without_targets_beside_one_with_is_refused():
    batch = pairs()
    del batch["chosen_labels"]
    with pytest.raises(BatchError, match=r"rejected_labels says.*no chosen_labels.*loss_normalization='samples'"):
        view(batch).target_counts()
    with pytest.raises(BatchError, match=r"in the fields chosen_\*: a batch has both labels and shift_labels"):
        view(pairs() | {"chosen_shift_labels": pairs()["chosen_labels"]}).target_counts()


def test_there_is_no_one_shape_of_a_token():
    seen = view(pairs())
    assert seen.shape_name == "[3, 5, ...] (chosen_input_ids) or [3, 3, ...] (rejected_input_ids)"
    for use in (seen.per_token, seen.flatten, seen.unflatten):
        with pytest.raises(BatchError, match="several sequences each"):
            use(torch.zeros(3, 5))


def test_padded_and_jagged_families_may_be_mixed():
    batch = family("chosen_", CHOSEN) | family("rejected_", REJECTED, "jagged")
    cut = view(batch).select([2])
    expected = family("rejected_", REJECTED, "jagged", seed=0)
    assert same_batch({"x": cut["rejected_input_ids"]}, {"x": view(expected).select([2])["rejected_input_ids"]})
    assert cut["chosen_input_ids"].shape == (1, 5)
