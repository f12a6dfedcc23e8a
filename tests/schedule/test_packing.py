"""Best fit into packs, against a plain search and against the fewest packs possible."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dcp.schedule.packing import best_fit
from tests.schedule.oracles import fewest_packs

quickly = settings(max_examples=100, deadline=None)
batches = st.lists(st.integers(1, 20), min_size=1, max_size=30)


def plain_best_fit(samples, lengths, capacity):
    packs = []
    for sample in samples:
        tokens = [sum(lengths[s] for s in own) for own in packs]
        fitting = [i for i in range(len(packs)) if tokens[i] + lengths[sample] <= capacity]
        if fitting:
            packs[max(fitting, key=lambda i: (tokens[i], -i))].append(sample)
        else:
            packs.append([sample])
    return packs


@given(batches, st.integers(20, 40))
@quickly
def test_each_sample_goes_to_the_fullest_pack_with_room(lengths, capacity):
    samples = range(len(lengths))
    assert best_fit(samples, lengths, capacity) == plain_best_fit(samples, lengths, capacity)


@given(batches, st.integers(20, 40), st.randoms())
@quickly
def test_samples_are_packed_once_within_the_capacity_in_any_order(lengths, capacity, random):
    samples = random.sample(range(len(lengths)), len(lengths))
    packs = best_fit(iter(samples), lengths, capacity)
    assert sorted(s for pack in packs for s in pack) == list(range(len(lengths)))
    assert all(0 < sum(lengths[s] for s in pack) <= capacity for pack in packs)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=9))
@quickly
def test_longest_first_needs_hardly_more_packs_than_the_fewest(lengths):
    """11/9 of the fewest and at most one more, the known bound of decreasing best fit."""
    samples = sorted(range(len(lengths)), key=lambda s: -lengths[s])
    packs = len(best_fit(samples, lengths, 20))
    fewest = fewest_packs(lengths, 20)
    assert fewest <= packs <= fewest * 11 / 9 + 1


def test_no_samples_are_no_packs():
    assert best_fit([], [5], 10) == []


def test_a_subset_of_the_batch_may_be_packed():
    assert best_fit([3, 1], [9, 4, 9, 6, 9], 10) == [[3, 1]]


@pytest.mark.parametrize(("lengths", "fewest"), [([10] * 4, 4), ([6, 4, 6, 4], 2), ([5] * 5, 3), ([7, 7, 3], 2)])
def test_the_count_of_fewest_packs_is_right(lengths, fewest):
    assert fewest_packs(lengths, 10) == fewest
    assert len(best_fit(range(len(lengths)), lengths, 10)) == fewest
