import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_dcp.data import EpochSampler

SMALL = st.integers(0, 200)


def order(size, *, seed=0, epoch=0, shuffle=True):
    sampler = EpochSampler(range(size), seed=seed, shuffle=shuffle)
    sampler.set_epoch(epoch)
    return list(sampler)


@given(SMALL, st.integers(0, 2**31), SMALL)
def test_a_permutation_that_depends_on_seed_and_epoch_only(size, seed, epoch):
    first = order(size, seed=seed, epoch=epoch)
    torch.rand(3)
    assert order(size, seed=seed, epoch=epoch) == first
    assert sorted(first) == list(range(size))


def test_global_random_state_is_neither_used_nor_moved():
    torch.manual_seed(1)
    first = order(50)
    state = torch.get_rng_state()
    torch.manual_seed(2)
    assert order(50) == first
    torch.manual_seed(1)
    assert torch.equal(torch.get_rng_state(), state)


@given(st.lists(st.tuples(SMALL, SMALL), min_size=2, max_size=6, unique=True))
def test_other_seeds_and_epochs_give_other_orders(pairs):
    orders = {tuple(order(100, seed=seed, epoch=epoch)) for seed, epoch in pairs}
    assert len(orders) == len(pairs)


@pytest.mark.parametrize("epoch", [0, 3])
def test_without_shuffle(epoch):
    assert order(7, epoch=epoch, shuffle=False) == list(range(7))


def test_length():
    assert len(EpochSampler(range(9))) == 9
