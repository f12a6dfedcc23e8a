import math
from collections import OrderedDict, namedtuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dcp.batch import PackedBatch, packed_to_jagged
from lightning_dcp.errors import BatchError
from lightning_dcp.step.outputs import PackOutput, join_outputs
from tests.batch.formats import make_samples, same_batch

Scored = namedtuple("Scored", "score name")


def pack_outputs(groups, lengths, step, weights=None):
    """What a step returned for packs of these samples."""
    weights = weights or [len(samples) / len(lengths) for samples in groups]
    return [
        PackOutput(tuple(samples), tuple(lengths[s] for s in samples), weight, step(list(samples)))
        for samples, weight in zip(groups, weights, strict=True)
    ]


def joined(groups, lengths, step, *, packed=False, weights=None):
    return join_outputs(pack_outputs(groups, lengths, step, weights), packed=packed)


@st.composite
def groupings(draw):
    """Lengths of samples, and the samples dealt over packs in any way."""
    lengths = draw(st.lists(st.integers(1, 5), min_size=1, max_size=8))
    packs = draw(st.integers(1, len(lengths)))
    homes = draw(st.lists(st.integers(0, packs - 1), min_size=len(lengths), max_size=len(lengths)))
    groups = [[s for s, home in enumerate(homes) if home == pack] for pack in range(packs)]
    return lengths, draw(st.permutations([group for group in groups if group]))


def entries(samples):
    """Values that name their sample, in all supported shapes; one call on the whole batch returns the same."""
    return {
        "vector": torch.tensor([[s, 10.0 * s] for s in samples]),
        "flag": torch.tensor([s % 2 == 0 for s in samples]),
        "names": [f"sample {s}" for s in samples],
        "nested": ({"number": torch.tensor(samples)}, [f"again {s}" for s in samples]),
        "tuple": Scored(torch.tensor(samples) * 0.5, [str(s) for s in samples]),
        "none": None,
    }


def assert_equal(ours, expected):
    assert type(ours) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert torch.equal(ours, expected)
        assert ours.dtype == expected.dtype
    elif isinstance(expected, dict):
        assert list(ours) == list(expected)
        for key, value in expected.items():
            assert_equal(ours[key], value)
    elif isinstance(expected, (list, tuple)):
        assert len(ours) == len(expected)
        for own, right in zip(ours, expected, strict=True):
            assert_equal(own, right)
    else:
        assert ours == expected


@given(groupings())
@settings(max_examples=80, deadline=None)
def test_entries_of_samples_come_back_in_the_batchs_order(case):
    lengths, groups = case
    assert_equal(joined(groups, lengths, entries), entries(list(range(len(lengths)))))


@given(groupings())
@settings(max_examples=50, deadline=None)
def test_tokens_of_a_packed_batch_come_back_in_order(case):
    lengths, groups = case
    whole = PackedBatch.from_samples(make_samples(lengths))

    def step(samples):
        return {name: whole.select(samples)[name] for name in ("vector", "index", "flag")}

    ours = joined(groups, lengths, step, packed=True)
    assert_equal(ours, step(range(len(lengths))))


@given(groupings())
@settings(max_examples=50, deadline=None)
def test_jagged_tensors_come_back_in_order(case):
    lengths, groups = case
    whole = PackedBatch.from_samples(make_samples(lengths))
    ours = joined(groups, lengths, lambda samples: packed_to_jagged(whole.select(samples)))
    assert same_batch(ours, packed_to_jagged(whole))


@given(groupings())
@settings(max_examples=30, deadline=None)
def test_packed_batches_come_back_in_order_with_their_ids(case):
    lengths, groups = case
    whole = PackedBatch.from_samples(make_samples(lengths), range(50, 50 + len(lengths)))
    assert same_batch(joined(groups, lengths, whole.select, packed=True), whole)


@given(groupings())
@settings(max_examples=50, deadline=None)
def test_rows_of_different_lengths_are_padded_with_zeros(case):
    """Packs are as wide as their own longest sample, the batch as wide as the longest of all."""
    lengths, groups = case

    def step(samples):
        width = max(lengths[s] for s in samples)
        rows = [[float(s + 1)] * lengths[s] + [0.0] * (width - lengths[s]) for s in samples]
        return torch.tensor(rows).unsqueeze(-1).expand(-1, -1, 2)

    assert_equal(joined(groups, lengths, step), step(range(len(lengths))))


def test_jagged_tensors_keep_their_own_lengths():
    """Generated answers, say, are not as long as the samples; here even their total is that of the samples."""
    answers = [torch.ones(4), torch.full((1,), 2.0), torch.full((2,), 3.0)]

    def step(samples):
        return torch.nested.nested_tensor([answers[s] for s in samples], layout=torch.jagged)

    ours = joined([[1], [0, 2]], [3, 1, 3], step)
    assert [part.tolist() for part in ours.unbind()] == [answer.tolist() for answer in answers]


def test_padding_goes_on_every_dimension_but_the_first():
    values = {0: torch.ones(1, 1, 3), 1: torch.ones(1, 2, 1)}
    ours = joined([[1], [0]], [1, 1], lambda samples: values[samples[0]])
    assert ours.tolist() == [[[1, 1, 1], [0, 0, 0]], [[1, 0, 0], [1, 0, 0]]]


# ------------------------------------------------------------------ scalars

LENGTHS, GROUPS = (2, 3, 4), ([0, 1], [2])


def values(*of_packs):
    """A step that returns these, pack after pack."""
    remaining = iter(of_packs)
    return lambda samples: next(remaining)


@pytest.mark.parametrize("make", [float, torch.tensor, lambda v: torch.tensor(v, dtype=torch.float64)])
def test_scalars_are_weighted_like_the_loss(make):
    ours = joined(GROUPS, LENGTHS, values(make(4.0), make(1.0)), weights=[0.25, 0.75])
    assert type(ours) is type(make(1.0))
    assert float(ours) == 1.75
    if isinstance(ours, torch.Tensor):
        assert ours.dtype == make(1.0).dtype
        assert ours.shape == ()


def test_packs_of_a_sum_are_added():
    assert joined(GROUPS, LENGTHS, values(4.0, 1.0), weights=[1.0, 1.0]) == 5.0


@pytest.mark.parametrize("make", [float, torch.tensor])
@pytest.mark.parametrize("place", [0, 1])
def test_a_pack_without_weight_does_not_count_even_if_it_is_nan(make, place):
    numbers, weights = [3.0, 3.0], [1.0, 1.0]
    numbers[place], weights[place] = math.nan, 0.0
    assert float(joined(GROUPS, LENGTHS, values(*map(make, numbers)), weights=weights)) == 3.0


def test_nan_of_a_pack_with_weight_is_kept():
    assert math.isnan(joined(GROUPS, LENGTHS, values(math.nan, 1.0), weights=[0.5, 0.5]))


def test_without_any_weight_scalars_are_averaged():
    assert joined(GROUPS, LENGTHS, values(4.0, 1.0), weights=[0.0, 0.0]) == 2.5


def test_the_loss_in_a_dict_beside_entries_of_samples():
    ours = joined(
        GROUPS,
        LENGTHS,
        values(
            {"loss": torch.tensor(4.0), "ids": torch.tensor([0, 1])},
            {"ids": torch.tensor([2]), "loss": torch.tensor(1.0)},
        ),
        weights=[0.25, 0.75],
    )
    assert float(ours["loss"]) == 1.75
    assert ours["ids"].tolist() == [0, 1, 2]


def test_none_everywhere_is_none():
    assert joined(GROUPS, LENGTHS, values(None, None)) is None


def test_tuples_and_lists_that_are_not_one_a_sample_are_walked():
    step = values((1.0, torch.tensor([10, 11])), (3.0, torch.tensor([12])))
    mean, ids = joined(GROUPS, LENGTHS, step, weights=[0.5, 0.5])
    assert mean == 2.0
    assert ids.tolist() == [10, 11, 12]
    step = values([1.0, 2.0, 3.0], [3.0, 4.0, 5.0])
    assert joined(GROUPS, LENGTHS, step, weights=[0.5, 0.5]) == [2.0, 3.0, 4.0]


@pytest.mark.parametrize("make", [torch.tensor, list])
def test_lists_that_may_be_of_samples_or_of_columns_are_refused(make):
    with pytest.raises(BatchError, match="Return a tuple or a dict of the latter"):
        joined([[0, 2], [1, 3]], [1] * 4, lambda samples: [make(samples), make([10 * s for s in samples])])
    ours = joined([[0, 2, 3], [1]], [1] * 4, lambda samples: [make(samples), make([10 * s for s in samples])])
    assert [list(column) for column in ours] == [[0, 1, 2, 3], [0, 10, 20, 30]]
    entries_of_samples = joined([[0, 2], [1, 3]], [1] * 4, lambda samples: [make([s] * 3) for s in samples])
    assert [list(entry) for entry in entries_of_samples] == [[s] * 3 for s in range(4)]


def test_mappings_of_other_types_are_walked():
    step = values(OrderedDict(a=torch.tensor([1, 2])), OrderedDict(a=torch.tensor([3])))
    assert joined(GROUPS, LENGTHS, step)["a"].tolist() == [1, 2, 3]


def test_one_token_row_of_a_batch_that_is_not_packed_is_one_entry():
    ours = joined([[1], [0]], [4, 4], lambda samples: torch.full((1, 4), float(samples[0])))
    assert ours.tolist() == [[0.0] * 4, [1.0] * 4]


def test_one_pack_may_return_anything():
    thing = object()
    assert joined([[0, 1]], [1, 1], values(thing)) is thing


# ------------------------------------------------------------------ what is refused


def jagged(*lengths):
    return torch.nested.nested_tensor([torch.ones(n) for n in lengths], layout=torch.jagged)


def packed(*lengths, drop=()):
    samples = [{k: v for k, v in sample.items() if k not in drop} for sample in make_samples(lengths)]
    return PackedBatch.from_samples(samples)


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ({"a": 1.0}, {"b": 1.0}, r"different keys: .*\['a'\].*\['b'\]"),
        ({"a": 1.0}, {"a": 1.0, "b": 1.0}, "different keys"),
        ({"a": 1.0, "b": 1.0}, {"a": 1.0}, "different keys"),
        (1.0, torch.tensor(1.0), r"different types: \['Tensor', 'float'\]"),
        (None, torch.tensor(1.0), "different types"),
        ([1.0], (1.0,), "different types"),
        ({"a": {"b": None}}, {"a": {"b": 1.0}}, "different types"),
        ((1.0, 2.0, 3.0), (1.0,), r"sequences of \[1, 3\] entries that are not one a sample"),
        (torch.ones(3), torch.ones(1), r"shapes \[\[3\], \[1\]\]"),
        (torch.ones(2, 5), torch.ones(2, 5), "one entry a sample"),
        (torch.ones(2), torch.tensor(1.0), r"shapes \[\[2\], \[\]\]"),
        (torch.tensor(1.0), torch.ones(1), r"shapes \[\[\], \[1\]\]"),
        (torch.ones(2, 5), torch.ones(1), "different dimensions"),
        (jagged(2, 3, 1), jagged(4), "jagged tensors without one entry a sample"),
        (packed(2, 3), packed(4, drop=["flag"]), "different fields"),
        (packed(2, 3, drop=["flag"]), packed(4), "different fields"),
        ({"text": "a"}, {"text": "b"}, "returned str, which cannot be put back"),
        (object(), object(), "returned object, which cannot be put back into sample order"),
    ],
)
def test_what_belongs_to_no_sample_is_refused(first, second, message):
    with pytest.raises(BatchError, match=message):
        joined(GROUPS, LENGTHS, values(first, second), packed=isinstance(first, PackedBatch))
