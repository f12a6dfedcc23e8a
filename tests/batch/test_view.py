from collections import UserDict, namedtuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dcp.batch import PackedBatch
from lightning_dcp.batch.view import JaggedView, PackedView, PaddedView, view
from lightning_dcp.errors import BatchError
from tests.batch.formats import FORMATS, in_format, make_samples, same_batch

LENGTHS = [4, 2, 5, 1]
every_format = pytest.mark.parametrize("fmt", FORMATS)


def cut(batch, drop=(), **changes):
    """A batch with some fields changed or left out."""
    if isinstance(batch, PackedBatch):
        kept = {name: field for name, field in batch.fields.items() if name not in drop}
        return PackedBatch(kept | changes, batch.cu_seqlens, batch.sample_ids)
    return {name: field for name, field in batch.items() if name not in drop} | changes


def unpadded(batch, name):
    """A field's tokens, sample after sample, found without the code under test."""
    if isinstance(batch, PackedBatch):
        return batch[name][0]
    if batch[name].is_nested:
        return torch.cat(batch[name].unbind())
    return batch[name][batch["attention_mask"].bool()]


@pytest.mark.parametrize(
    ("fmt", "kind"),
    [("packed", PackedView), ("padded", PaddedView), ("padded-left", PaddedView), ("jagged", JaggedView)],
)
def test_the_format_is_recognised(fmt, kind):
    assert type(view(in_format(make_samples(LENGTHS), fmt))) is kind


@every_format
def test_lengths_and_ids(fmt):
    seen = view(in_format(make_samples(LENGTHS), fmt))
    assert seen.lengths == tuple(LENGTHS)
    assert seen.sample_ids == (0, 1, 2, 3)
    assert all(type(n) is int for n in seen.lengths)
    seen.check()


@every_format
@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.randoms(use_true_random=False))
@settings(max_examples=25, deadline=None)
def test_selected_samples_are_the_batch_that_the_collate_function_would_make_of_them(fmt, lengths, random):
    samples = make_samples(lengths)
    rows = random.sample(range(len(lengths)), random.randint(1, len(lengths)))
    chosen = view(in_format(samples, fmt)).select(rows)
    fmt = "padded" if fmt == "padded-wide" else fmt  # columns that no row uses are cut off
    expected = in_format([samples[i] for i in rows], fmt)
    if fmt == "packed":
        assert chosen.sample_ids == tuple(rows)
        chosen.sample_ids = expected.sample_ids
    if fmt == "padded-left":  # leading columns stay, so that outputs lie where they would have without a cut
        width = expected["input_ids"].shape[1]
        chosen = {name: value[:, -width:] for name, value in chosen.items()}
    assert same_batch(chosen, expected)


@every_format
@pytest.mark.parametrize("name", ["input_ids", "flag", "vector", "index"])
def test_flatten_gives_the_tokens_in_order_and_unflatten_puts_them_back(fmt, name):
    samples = make_samples(LENGTHS)
    batch = in_format(samples, fmt)
    seen = view(batch)
    flat = seen.flatten(batch[name])
    assert torch.equal(flat, torch.cat([sample[name] for sample in samples]))
    back = seen.unflatten(flat)
    assert seen.per_token(back)
    assert torch.equal(unpadded(cut(batch, ours=back), "ours"), flat)
    assert torch.equal(seen.flatten(back), flat)
    if not isinstance(batch, PackedBatch) and not back.is_nested:
        assert back.shape == batch[name].shape
        assert not back[batch["attention_mask"] == 0].any()


@every_format
def test_gradients_pass_through_flatten_and_unflatten(fmt):
    seen = view(in_format(make_samples(LENGTHS), fmt))
    packed = torch.rand(sum(LENGTHS), 2, dtype=torch.float64, requires_grad=True)
    factor = torch.rand(sum(LENGTHS), 2, dtype=torch.float64)
    (seen.flatten(seen.unflatten(packed)) * factor).sum().backward()
    assert torch.equal(packed.grad, factor)


@every_format
def test_per_token_tells_tokens_from_other_tensors(fmt):
    batch = in_format(make_samples(LENGTHS), fmt)
    seen = view(batch)
    assert all(seen.per_token(batch[name]) for name in batch)
    other = view(in_format(make_samples([2, 4, 5, 2]), fmt)).batch["vector"]
    for strange in (torch.ones(len(LENGTHS)), torch.ones(len(LENGTHS), 77), torch.tensor(1.0), other):
        same_shape = fmt.startswith("padded") and strange is other  # one shape, whatever the lengths
        assert seen.per_token(strange) == same_shape


@pytest.mark.parametrize(
    ("fmt", "name"), [("packed", "[1, 12, ...]"), ("padded", "[4, 5, ...]"), ("jagged", "jagged [4, (T), ...]")]
)
def test_the_shape_of_a_per_token_tensor_is_named(fmt, name):
    assert view(in_format(make_samples(LENGTHS), fmt)).shape_name == name


@every_format
def test_fingerprint_covers_every_field(fmt):
    fingerprint = view(in_format(make_samples(LENGTHS), fmt)).fingerprint()
    assert view(in_format(make_samples(LENGTHS), fmt)).fingerprint() == fingerprint
    for name in make_samples(LENGTHS)[0]:
        samples = make_samples(LENGTHS)
        changed = samples[2][name].clone()
        changed[0] = ~changed[0] if changed.dtype == torch.bool else changed[0] + 1
        samples[2][name] = changed
        assert view(in_format(samples, fmt)).fingerprint() != fingerprint, name


# ------------------------------------------------------------------ what belongs to samples, or to the whole batch


Pair = namedtuple("Pair", "a b")


@pytest.mark.parametrize("fmt", ["padded", "padded-left", "jagged"])
def test_entries_a_sample_follow_and_the_rest_passes(fmt):
    scalar, table = torch.tensor(2.5), torch.arange(14).view(7, 2)
    batch = in_format(make_samples(LENGTHS), fmt) | {
        "reward": torch.tensor([1.0, 2.0, 3.0, 4.0]),
        "pairs": torch.arange(8).view(4, 2),
        "names": ["a", "b", "c", "d"],
        "places": (10, 20, 30, 40),
        "scalar": scalar,
        "table": table,
        "kind": "four",
        "step": 3,
        "nothing": None,
        "short": [1, 2],
    }
    chosen = view(batch).select([2, 0])
    assert chosen["reward"].tolist() == [3.0, 1.0]
    assert chosen["pairs"].tolist() == [[4, 5], [0, 1]]
    assert chosen["names"] == ["c", "a"]
    assert chosen["places"] == (30, 10)
    assert chosen["scalar"] is scalar
    assert chosen["table"] is table
    assert [chosen[name] for name in ("kind", "step", "nothing", "short")] == ["four", 3, None, [1, 2]]


@pytest.mark.parametrize("fmt", ["padded", "jagged"])
def test_a_named_tuple_is_no_list_of_samples(fmt):
    pair = Pair(1, 2)
    batch = in_format(make_samples([2, 3]), fmt) | {"pair": pair}
    assert view(batch).select([1])["pair"] == pair


class AttributeDict(dict):
    __getattr__ = dict.__getitem__


class Encoding(UserDict):
    def __getattr__(self, name):
        if name == "data":
            raise AttributeError(name)
        return self.data[name]


@pytest.mark.parametrize("fmt", ["padded", "jagged"])
@pytest.mark.parametrize("kind", [AttributeDict, Encoding])
def test_a_mapping_keeps_its_type(kind, fmt):
    samples = make_samples(LENGTHS)
    batch = kind(in_format(samples, fmt))
    chosen = view(batch).select([1])
    assert type(chosen) is kind
    assert same_batch(dict(chosen), in_format([samples[1]], fmt))
    assert chosen.input_ids.shape[0] == 1
    assert view(batch).lengths == tuple(LENGTHS)  # the batch itself is as it was


# ------------------------------------------------------------------ targets


def all_targets(lengths):
    return [sample | {"labels": sample["input_ids"]} for sample in make_samples(lengths)]


@every_format
def test_the_first_label_of_a_sample_is_no_target(fmt):
    counts = view(in_format(all_targets([2, 3, 5]), fmt)).target_counts()
    assert counts == (1, 2, 4)
    assert sum(counts) == 7


@every_format
def test_prompt_tokens_are_no_targets(fmt):
    sample = all_targets([10])[0]
    sample["labels"] = sample["labels"].clone()
    sample["labels"][:6] = -100
    assert view(in_format([sample], fmt)).target_counts() == (4,)


@every_format
def test_shift_labels_count_as_they_are(fmt):
    sample = all_targets([2, 3])
    for one in sample:
        one["shift_labels"] = one.pop("labels")
    assert view(in_format(sample, fmt)).target_counts() == (2, 3)


@every_format
def test_a_loss_mask_counts_where_there_are_no_labels(fmt):
    samples = all_targets([2, 3])
    for one in samples:
        del one["labels"]
    samples[0]["loss_mask"] = torch.tensor([0.0, 1.0])
    samples[1]["loss_mask"] = torch.tensor([1.0, 0.0, 1.0])
    assert view(in_format(samples, fmt)).target_counts() == (1, 2)
    samples[1]["loss_mask"] = torch.tensor([0.5, 0.0, 1.0])
    with pytest.raises(BatchError, match="other than 0 and 1"):
        view(in_format(samples, fmt)).target_counts()


@pytest.mark.parametrize("fmt", ["padded", "padded-left"])
def test_padding_is_never_counted(fmt):
    batch = cut(in_format(make_samples([2, 3]), fmt), drop=["labels"], loss_mask=torch.ones(2, 3))
    assert view(batch).target_counts() == (2, 3)


@pytest.mark.parametrize("fmt", ["padded", "padded-left"])
@pytest.mark.parametrize("name", ["labels", "shift_labels"])
def test_targets_in_padding_are_refused(fmt, name):
    """A loss of padded rows counts them, one of packs never sees them: the two would differ in silence."""
    batch = cut(in_format(make_samples([2, 3]), fmt), drop=["labels"], **{name: torch.ones(2, 3, dtype=torch.int64)})
    with pytest.raises(BatchError, match=f"{name} of row 0 are not -100 in its padding"):
        view(batch).target_counts()


def test_columns_of_a_field_hold_what_is_real_in_them():
    batch = in_format(make_samples([2, 5, 3]), "padded")
    seen, ids = view(batch), batch["input_ids"]
    assert seen.sequences(ids[:, :-1]).lengths == (2, 4, 3)
    assert seen.sequences(ids[:, 1:]).lengths == (1, 4, 2)
    assert seen.sequences(batch["vector"][:, 1:3]).lengths == (1, 2, 2)
    left = in_format(make_samples([2, 5, 3]), "padded-left")
    assert view(left).sequences(left["input_ids"][:, :-1]).lengths == (1, 4, 2)
    # the same numbers in memory of their own, other steps, or a mask of the call
    assert seen.sequences(ids[:, :-1].clone()).lengths == (4, 4, 4)
    assert seen.sequences(ids[:, ::2]).lengths == (3, 3, 3)
    assert seen.sequences(ids[:2]).lengths == (5, 5)
    assert seen.sequences(ids[:, :-1], torch.tensor([[0, 1, 1, 0]] * 3)).lengths == (2, 2, 2)


SUBSETS = [[0], [2], [1, 0], [2, 1], [0, 1, 2]]


@pytest.mark.parametrize("indices", SUBSETS, ids=str)
@pytest.mark.parametrize("fmt", [*FORMATS, "restarts", "numbers", "flattened", "families"])
def test_a_part_holds_the_samples_that_were_asked_for(fmt, indices):
    """Whatever it looks like by itself: a row whose positions begin again is one document, if the batch says so."""
    ids = torch.arange(1, 25).reshape(3, 8)
    whole = {"input_ids": ids, "attention_mask": torch.ones(3, 8, dtype=torch.int64)}
    batch = {
        "restarts": whole | {"position_ids": torch.arange(4).repeat(3, 2)},
        "numbers": whole | {"seq_idx": torch.tensor([0] * 5 + [1] * 3).expand(3, 8)},
        "flattened": {"input_ids": ids.reshape(1, -1), "cu_seq_lens_q": torch.tensor([0, 5, 6, 24], dtype=torch.int32)},
        "families": {f"{kind}_{name}": value for kind in ("chosen", "rejected") for name, value in whole.items()}
        | {"chosen_position_ids": torch.arange(4).repeat(3, 2)},
    }.get(fmt)
    seen = view(in_format(make_samples([2, 5, 3]), fmt) if batch is None else batch)
    part = seen.part(indices)
    assert part.lengths == tuple(seen.lengths[i] for i in indices)
    assert type(part) is type(seen)
    assert same_batch(part.batch, seen.select(indices))


@every_format
def test_labels_with_a_loss_mask_are_refused(fmt):
    samples = [one | {"loss_mask": torch.ones(len(one["labels"]))} for one in all_targets([2, 3])]
    with pytest.raises(BatchError, match="labels and a loss_mask"):
        view(in_format(samples, fmt)).target_counts()


@every_format
def test_without_labels_every_token_but_the_last_is_one(fmt):
    batch = cut(in_format(make_samples([2, 3, 1]), fmt), drop=["labels"])
    assert view(batch).target_counts() == (1, 2, 0)


@pytest.mark.parametrize("fmt", ["padded", "jagged"])
def test_one_label_a_sample_is_one_target(fmt):
    batch = cut(in_format(make_samples([4, 2, 5]), fmt), labels=torch.tensor([1, -100, 0]))
    assert view(batch).target_counts() == (1, 0, 1)


@every_format
@given(st.lists(st.integers(1, 7), min_size=1, max_size=5), st.integers(0, 999))
@settings(max_examples=25, deadline=None)
def test_counts_are_those_of_a_loop_over_samples(fmt, lengths, seed):
    samples = make_samples(lengths, seed=seed)
    expected = tuple(sum(label != -100 for label in sample["labels"].tolist()[1:]) for sample in samples)
    assert view(in_format(samples, fmt)).target_counts() == expected


@every_format
def test_labels_and_shift_labels_together_are_refused(fmt):
    batch = in_format(make_samples(LENGTHS), fmt)
    with pytest.raises(BatchError, match="both labels and shift_labels"):
        view(cut(batch, shift_labels=batch["labels"])).target_counts()


@pytest.mark.parametrize("fmt", ["padded", "jagged"])
@pytest.mark.parametrize("name", ["labels", "shift_labels", "loss_mask"])
@pytest.mark.parametrize("value", [torch.ones(4, 9), torch.ones(3), None, [1, 2, 3, 4]], ids=repr)
def test_targets_of_another_shape_are_refused(fmt, name, value):
    batch = cut(in_format(make_samples(LENGTHS), fmt), drop=["labels"], **{name: value})
    with pytest.raises(BatchError, match=f"{name} must hold one entry a token"):
        view(batch).target_counts()


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("batch", "found"),
    [
        ([torch.ones(2, 3)], "list"),
        (torch.ones(2, 3), "Tensor"),
        (None, "NoneType"),
        ({"pixels": torch.ones(2, 3), "labels": torch.ones(2)}, r"a mapping with keys \['labels', 'pixels'\]"),
        ({}, r"a mapping with keys \[\]"),
        ({"input_ids": [[1, 2], [3]]}, "a mapping with keys"),
    ],
)
def test_an_unknown_format_is_told_the_supported_ones(batch, found):
    with pytest.raises(BatchError, match=f"found {found}.*PackedBatch.*attention_mask.*jagged nested tensors"):
        view(batch)


@every_format
def test_empty_samples_are_named(fmt):
    samples = make_samples([2, 0, 3, 0])
    with pytest.raises(BatchError, match=r"empty sample\(s\) \[1, 3\]"):
        view(in_format(samples, fmt)).check()


def test_an_empty_sample_of_a_packed_batch_is_named_by_its_id():
    with pytest.raises(BatchError, match=r"empty sample\(s\) \[52\]"):
        view(PackedBatch.from_samples(make_samples([2, 0]), [51, 52])).check()


@pytest.mark.parametrize(
    "batch",
    [
        {"input_ids": torch.ones(0, 3, dtype=torch.int64), "attention_mask": torch.ones(0, 3)},
        {"input_ids": torch.nested.nested_tensor_from_jagged(torch.zeros(0), torch.tensor([0]))},
    ],
    ids=["padded", "jagged"],
)
def test_a_batch_without_samples_is_refused(batch):
    with pytest.raises(BatchError, match="holds no sample"):
        view(batch).check()


def test_jagged_fields_of_different_lengths_are_refused():
    one, other = (
        torch.nested.nested_tensor([torch.ones(n) for n in lengths], layout=torch.jagged)
        for lengths in ([2, 3], [3, 2])
    )
    with pytest.raises(BatchError, match="'more' has other sample lengths"):
        view({"input_ids": one, "more": other})
