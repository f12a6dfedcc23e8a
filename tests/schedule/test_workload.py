"""A batch as the planner sees it, against the cost model's own formula and against every size tried one by one."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dcp.schedule.workload import Workload
from tests.schedule.oracles import pack_seconds
from tests.schedule.plans import cost_models, speeds_of

quickly = settings(max_examples=50, deadline=None)
SIZES = (1, 2, 4, 8)


@st.composite
def workloads(draw):
    limit = draw(st.sampled_from([1, 30, 5000]))
    short, any_length = st.integers(1, min(limit, 12)), st.integers(1, 8 * limit)
    lengths = draw(st.lists(st.one_of(short, any_length), min_size=1, max_size=20))
    cost = draw(cost_models())
    nodes = draw(st.sampled_from([None, 1, 2, 4, 8]))  # of which no group crosses without need
    return Workload(lengths, 8, limit, type(cost)(**vars(cost) | {"ranks_per_node": nodes}), SIZES), lengths


@given(workloads())
@quickly
def test_samples_come_longest_first_and_first_in_the_batch_first(case):
    load, lengths = case
    assert load.order == sorted(range(len(lengths)), key=lambda s: (-lengths[s], s))
    assert load.lengths == [lengths[s] for s in load.order]


@given(workloads())
@quickly
def test_samples_alone_cost_what_packs_of_them_cost(case):
    load, _ = case
    for c in SIZES:
        expected = [pack_seconds(load.cost, [n], c) for n in load.lengths]
        fits = [n <= c * load.limit for n in load.lengths]
        alone = [seconds if fit else float("inf") for seconds, fit in zip(expected, fits, strict=True)]
        assert load.alone[c].tolist() == pytest.approx(alone, rel=1e-9)
        overhead = load.cost.pack_overhead
        assert [s + overhead for s in load.share(c)] == pytest.approx(expected, rel=1e-9)


@given(workloads(), st.sampled_from(SIZES))
@quickly
def test_packs_cost_what_the_cost_model_says(case, c):
    load, _ = case
    attention = sum(load.attention(c))
    seconds = load.seconds_of(c, sum(load.lengths), attention)
    assert seconds == pytest.approx(pack_seconds(load.cost, load.lengths, c), rel=1e-9)


@given(workloads(), st.floats(0, 2))
@quickly
def test_samples_get_the_smallest_size_within_the_target_or_else_the_quickest(case, share):
    """Never more ranks than tokens, unless the limit forces it."""
    load, _ = case
    target = share * max(load.alone[8].tolist())
    for sample, chosen in enumerate(load.smallest_within(target).tolist()):
        seconds = {c: float(load.alone[c][sample]) for c in SIZES if load.lengths[sample] <= c * load.limit}
        useful = {c: s for c, s in seconds.items() if c <= max(load.lengths[sample], min(seconds))}
        within = [c for c, s in useful.items() if s <= target]
        assert chosen == (min(within) if within else min(useful, key=lambda c: (useful[c], c)))


@given(speeds_of(8))
@quickly
def test_blocks_are_as_fast_as_their_slowest_rank(speeds):
    load = Workload([1], 8, 1, None, SIZES, speeds)
    assert load.block_speeds(2) == [min(speeds[i], speeds[i + 1]) for i in range(0, 8, 2)]
    assert load.block_speeds(8) == [min(speeds)]
    assert Workload([1], 8, 1, None, SIZES).block_speeds(4) == [1.0, 1.0]
