"""Batches that are drawn, and what predictions are compared by."""

import math

import numpy as np
import pytest

from lightning_dcp.calibration.batches import varied_batches
from lightning_dcp.calibration.prediction import predict
from lightning_dcp.schedule import CostModel
from lightning_dcp.schedule.plan import Pack, StepPlan

COST = CostModel(linear=1.0, attention=0.0)


def plan(*lengths):
    """All samples in one pack on the first of two ranks, then all on both."""
    packs = Pack(0, 1, tuple(range(len(lengths))))
    return StepPlan(2, 1000, lengths, ((packs,),))


def test_batches_differ_and_vary_in_size_and_kind():
    lengths = list(range(1, 401))
    batches = varied_batches(lengths, 8, 40, longest=300, seed=3)
    assert len(set(batches)) == 40
    assert {len(batch) for batch in batches} == set(range(2, 9))
    assert all(1 <= n <= 300 for batch in batches for n in batch)
    means = np.array([np.mean(batch) for batch in batches])
    assert means.max() > 1.5 * means.min()
    assert batches == varied_batches(lengths, 8, 40, longest=300, seed=3)
    assert batches != varied_batches(lengths, 8, 40, longest=300, seed=4)


def test_data_of_one_length_gives_different_batches_too():
    batches = varied_batches([5], 1, 12, longest=9)
    assert len(set(batches)) == 12
    assert {n for batch in batches for n in batch} == {5}


def test_predictions_are_simulated_and_compared():
    plans = [plan(10), plan(20), plan(10, 30)]
    found = predict(plans, [11.0, 22.0, 44.0], COST)
    assert found.predicted.tolist() == [10.0, 20.0, 40.0]
    assert found.correlation == pytest.approx(1.0)
    assert found.mean_ratio == pytest.approx(1.1)
    assert found.median_error == pytest.approx(1 - 10 / 11)
    assert found.to_dict()["batches"][2] == {
        "lengths": [10, 30],
        "packs": {"1": 1},
        "predicted_s": 40.0,
        "measured_s": 44.0,
    }


def test_the_correlation_is_pearsons():
    measured = [3.0, 1.0, 2.0, 5.0]
    plans = [plan(n) for n in (1, 2, 3, 4)]
    expected = np.corrcoef([1, 2, 3, 4], measured)[0, 1]
    assert predict(plans, measured, COST).correlation == pytest.approx(expected)
    assert math.isnan(predict(plans, [1.0] * 4, COST).correlation)
