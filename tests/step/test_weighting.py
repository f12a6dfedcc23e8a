import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dcp.loss.weighting import backward_scale, pack_weight
from lightning_dcp.schedule import Pack
from tests.schedule.plans import plans


@pytest.mark.parametrize("normalization", ["tokens", "samples"])
@given(plans(), st.data())
@settings(max_examples=60, deadline=None)
def test_weights_of_all_packs_add_up_to_one(normalization, plan, data):
    targets = data.draw(st.lists(st.integers(0, 50), min_size=len(plan.lengths), max_size=len(plan.lengths)))
    weights = [pack_weight(normalization, pack, targets) for pack in plan.packs()]
    none = normalization == "tokens" and not any(targets)
    assert sum(weights) == pytest.approx(0.0 if none else 1.0, abs=1e-12)
    assert all(weight >= 0 for weight in weights)


@given(plans(), st.data())
@settings(max_examples=20, deadline=None)
def test_packs_of_a_sum_count_fully(plan, data):
    targets = data.draw(st.lists(st.integers(0, 50), min_size=len(plan.lengths), max_size=len(plan.lengths)))
    assert [pack_weight("sum", pack, targets) for pack in plan.packs()] == [1.0] * len(list(plan.packs()))


PACKS = [Pack(0, 1, (0,)), Pack(1, 1, (1, 2))]


@pytest.mark.parametrize(
    ("normalization", "targets", "weights"),
    [
        ("tokens", (2, 3, 3), [0.25, 0.75]),
        ("tokens", (0, 3, 3), [0.0, 1.0]),
        ("tokens", (0, 0, 0), [0.0, 0.0]),
        ("samples", (2, 3, 3), [1 / 3, 2 / 3]),
        ("samples", (0, 0, 0), [1 / 3, 2 / 3]),
        ("sum", (0, 3, 3), [1.0, 1.0]),
    ],
)
def test_weights(normalization, targets, weights):
    assert [pack_weight(normalization, pack, targets) for pack in PACKS] == weights


def test_a_token_mean_weighs_packs_by_targets_and_not_alike():
    """Two targets of mean 4 and six of mean 1 give 14 / 8; the mean of means would be 2.5."""
    losses = [4.0, 1.0]
    weights = [pack_weight("tokens", pack, (2, 3, 3)) for pack in PACKS]
    assert sum(weight * loss for weight, loss in zip(weights, losses, strict=True)) == 1.75


def test_tokens_and_samples_weigh_documents_of_unequal_length_differently():
    packs, targets = [Pack(0, 1, (0,)), Pack(1, 1, (1,))], (7, 2)
    assert [pack_weight("tokens", pack, targets) for pack in packs] == [7 / 9, 2 / 9]
    assert [pack_weight("samples", pack, targets) for pack in packs] == [0.5, 0.5]


def test_ranks_of_a_large_group_do_not_count_targets_again():
    """One document on four ranks, then four of one rank each: 24 targets, not 4 * 8 + 16."""
    targets = (8, 4, 4, 4, 4)
    packs = [Pack(0, 4, (0,)), *(Pack(rank, 1, (rank + 1,)) for rank in range(4))]
    assert [pack_weight("tokens", pack, targets) for pack in packs] == [8 / 24] + [4 / 24] * 4


@pytest.mark.parametrize(
    ("weight", "cp_size", "accumulate", "scale"),
    [(0.5, 1, 1, 0.5), (0.5, 4, 1, 0.125), (1.0, 2, 4, 0.125), (0.0, 2, 2, 0.0)],
)
def test_scale_of_a_loss_before_backward(weight, cp_size, accumulate, scale):
    assert backward_scale(weight, cp_size, accumulate) == scale


@given(plans(), st.integers(1, 8))
@settings(max_examples=30, deadline=None)
def test_scales_of_all_ranks_and_accumulated_batches_add_up_to_one(plan, accumulate):
    """Every rank of a group runs backward on the same loss, in each batch of the window."""
    targets = plan.lengths
    total = sum(
        backward_scale(pack_weight("tokens", pack, targets), pack.cp_size, accumulate) * len(pack.ranks)
        for pack in plan.packs()
    )
    assert total * accumulate == pytest.approx(1.0, abs=1e-12)
