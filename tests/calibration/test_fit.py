"""The fit finds the coefficients by which steps were made up."""

from dataclasses import replace

import numpy as np
import pytest

from lightning_dcp.calibration import Observation, default_lengths, fit_cost_model, grid
from lightning_dcp.errors import ConfigurationError
from lightning_dcp.schedule import CostModel

TABLE = ((1, 0.01), (16, 0.1), (128, 0.5), (1024, 1.0))
TRUE = CostModel(
    linear=3e-4,
    attention=2e-7,
    efficiency=TABLE,
    pack_overhead=0.02,
    hop_latency=0.004,
    hop_bytes=9216.0,
    bandwidth=5e7,
)
COEFFICIENTS = ("linear", "attention", "pack_overhead", "hop_latency", "bandwidth")


def observe(cost, ranks=4, limit=1024, noise=0.0, seed=0):
    """A whole grid of steps that take as long as a cost model says, more or less."""
    random = np.random.default_rng(seed)
    found = []
    for point in grid(default_lengths(ranks, limit), ranks, limit):
        seconds = point.packs * cost.pack_seconds(point.samples, point.cp_size)
        seconds *= float(np.exp(noise * random.standard_normal()))
        found.append(Observation(point.samples, point.cp_size, point.packs, seconds))
    return found


def fit(cost, **options):
    return fit_cost_model(
        observe(cost, **options),
        efficiency=cost.efficiency,
        hop_bytes=cost.hop_bytes,
        ranks_per_node=cost.ranks_per_node,
    )


def test_exact_steps_give_the_coefficients_back():
    found = fit(TRUE)
    for name in COEFFICIENTS:
        assert getattr(found.cost, name) == pytest.approx(getattr(TRUE, name), rel=1e-6), name
    assert found.cost.overlap == 0.0
    assert found.cost.efficiency == TABLE
    assert found.r_squared == pytest.approx(1.0)
    assert found.median_residual < 1e-9


@pytest.mark.parametrize("ranks", [2, 3, 6])
def test_other_planes_give_the_coefficients_back_too(ranks):
    found = fit(TRUE, ranks=ranks)
    assert [getattr(found.cost, n) for n in COEFFICIENTS] == pytest.approx([getattr(TRUE, n) for n in COEFFICIENTS])


@pytest.mark.parametrize("overlap", [0.3, 1.0])
def test_the_overlap_is_found_also_where_some_hops_are_hidden_whole(overlap):
    true = replace(TRUE, overlap=overlap, bandwidth=4e8, hop_latency=1e-3)
    steps = observe(true)
    exposed = [true.exposed_seconds(o.cp_size, sum(o.samples), true.attention_seconds(o.samples, o.cp_size).sum())
               for o in steps if o.cp_size > 1]  # fmt: skip
    assert 0 < sum(e == 0 for e in exposed) < len(exposed), "the case is not what it should be"
    found = fit(true)
    assert found.cost.overlap == overlap
    assert [getattr(found.cost, n) for n in COEFFICIENTS] == pytest.approx(
        [getattr(true, n) for n in COEFFICIENTS], rel=1e-4
    )


@pytest.mark.parametrize("seed", range(3))
def test_noise_of_five_percent_moves_predictions_little(seed):
    found = fit(TRUE, noise=0.05, seed=seed)
    exact = np.array([o.seconds for o in observe(TRUE)])
    assert np.abs(found.predicted / exact - 1).max() < 0.06
    assert 0.01 < found.median_residual < 0.06
    assert found.cost.linear == pytest.approx(TRUE.linear, rel=0.15)
    assert found.cost.attention == pytest.approx(TRUE.attention, rel=0.15)


def test_on_one_rank_nothing_is_said_of_hops():
    found = fit(TRUE, ranks=1)
    assert (found.cost.hop_latency, found.cost.hop_bytes, found.cost.overlap) == (0.0, 0.0, 0.0)
    assert found.cost.linear == pytest.approx(TRUE.linear)


def test_groups_that_span_nodes_have_transfers_of_their_own():
    true = replace(TRUE, internode_latency=0.05, internode_bandwidth=1e6, ranks_per_node=2)
    found = fit(true, ranks=8)
    names = (*COEFFICIENTS, "internode_latency", "internode_bandwidth")
    assert [getattr(found.cost, n) for n in names] == pytest.approx([getattr(true, n) for n in names])
    assert found.cost.ranks_per_node == 2


def test_inside_one_node_transfers_to_another_are_taken_to_be_alike():
    found = fit(TRUE)
    assert found.cost.internode_latency == found.cost.hop_latency
    assert found.cost.internode_bandwidth == found.cost.bandwidth


def test_free_transfers_give_a_bandwidth_too_large_to_matter():
    found = fit(replace(TRUE, bandwidth=1e30))
    assert found.cost.hop_bytes == TRUE.hop_bytes
    assert found.cost.hop_bytes / found.cost.bandwidth < 1e-9


@pytest.mark.parametrize("seed", range(5))
def test_no_coefficient_is_negative_however_wild_the_noise(seed):
    cost = fit(TRUE, noise=1.0, seed=seed).cost  # CostModel itself refuses negative values
    assert cost.linear + cost.attention > 0


def test_the_fit_with_a_bound_is_the_best_one_within_it():
    """Steps that get cheaper per token with length pull attention below 0: it must be 0, the rest fitted anew."""
    steps = [Observation((n,), 1, 1, 0.01 + 1e-3 * n**0.8) for n in (64, 128, 256, 512, 1024)]
    found = fit_cost_model(steps)
    assert found.cost.attention == 0.0
    rows = np.array([[1.0, sum(o.samples)] for o in steps]) / found.measured[:, None]
    expected, *_ = np.linalg.lstsq(rows, np.ones(len(steps)), rcond=None)
    assert [found.cost.pack_overhead, found.cost.linear] == pytest.approx(expected.tolist())


def test_steps_that_do_not_grow_with_their_tokens_are_refused():
    steps = [Observation((n,), 1, 1, 0.1) for n in (64, 128, 256)]
    with pytest.raises(ConfigurationError, match="take no longer with more tokens"):
        fit_cost_model(steps)
