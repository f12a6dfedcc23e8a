"""Which logged values are the loss, and what is said of a batch_size that is the number of samples."""

from __future__ import annotations

import warnings

import pytest
import torch

from lightning_dcp.step.logs import LoggedValue, WeightedLogs, join_values, mark_loss
from lightning_dcp.step.logs import _warn_of_rows as warn_of_rows


def entries(values, sizes, *, weights=(0.8, 0.2), samples=(1, 3), losses=None):
    found = []
    for i, (value, size) in enumerate(zip(values, sizes, strict=True)):
        logs = {"x": [LoggedValue(torch.tensor(value), size)]}
        mark_loss(logs, None if losses is None else torch.tensor(losses[i]))
        found.append((logs["x"][0], WeightedLogs(logs, weights[i], samples[i])))
    return found


def test_the_loss_is_weighted_like_itself_whatever_batch_size_says():
    assert float(join_values(entries([1.0, 2.0], [1, 3], losses=[1.0, 2.0]))) == pytest.approx(1.2)
    assert float(join_values(entries([1.0, 2.0], [1, 3], losses=[1.0, 7.0]))) == pytest.approx(1.75)
    assert float(join_values(entries([1.0, 2.0], [1, 3]))) == pytest.approx(1.75)


def test_a_loss_over_no_targets_is_the_loss_too():
    nan = float("nan")
    assert float(join_values(entries([1.0, nan], [1, 3], weights=(1.0, 0.0), losses=[1.0, nan]))) == 1.0


@pytest.mark.parametrize(
    ("sizes", "weights", "losses", "warned"),
    [
        ([1, 3], (0.8, 0.2), None, True),
        ([1, 3], (0.25, 0.75), None, False),  # targets and samples have equal shares
        ([8, 2], (0.8, 0.2), None, False),  # a number of targets
        ([1, 3], (0.8, 0.2), [1.0, 2.0], False),  # the loss
    ],
)
def test_a_mean_by_rows_is_warned_of(sizes, weights, losses, warned):
    given = entries([1.0, 2.0], sizes, weights=weights, losses=losses)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_rows("x", given)
    assert [("number of samples" in str(w.message)) for w in caught] == [True] * warned
