"""Stages with unequal numbers of layers, and widths that no number of ranks divides, agree with one process."""

from __future__ import annotations

from typing import Any

import pytest

from tests.megatron import runs
from tests.support.ranks import RankPool
from tests.support.training import assert_same

LENGTHS = (9, 5, 7, 3)
BOTH = dict.fromkeys(("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"), True)
PIPELINE = {"pipeline_model_parallel_size": 2}
DEALS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "embedding and loss count as layers": (PIPELINE, BOTH),
    "one layer on the first stage": (PIPELINE, {"num_layers_in_first_pipeline_stage": 1}),
    "three layers on the last stage": (PIPELINE, {"num_layers_in_last_pipeline_stage": 3}),
    "a layout": (PIPELINE, {"pipeline_model_parallel_layout": "Ettt|tL"}),
    "a layout of chunks": (
        PIPELINE | {"virtual_pipeline_model_parallel_size": 2},
        {"pipeline_model_parallel_layout": "E|tt|t|tL"},
    ),
}
ODD = runs.DENSE | {"hidden_size": 17, "kv_channels": 4}


def whole(config: dict[str, Any]) -> dict[str, Any]:
    return fit({}, config)


def fit(strategy: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    return runs.fit(config, LENGTHS, len(LENGTHS), strategy | {"max_seqlen_per_dp_cp_rank": 12})


def deals(names: list[str]) -> dict[str, dict[str, Any]]:
    return {name: fit(strategy, runs.DENSE | fields) for name, (strategy, fields) in DEALS.items() if name in names}


def assert_deals(ranks: RankPool, names: list[str]) -> None:
    [expected] = ranks.run(whole, 1, runs.DENSE)
    for outcome in ranks.run(deals, 2, names):
        assert list(outcome) == names
        for own in outcome.values():
            assert_same(own, expected, 1e-9)


def test_layouts_of_layers_agree(ranks: RankPool) -> None:
    assert_deals(ranks, ["embedding and loss count as layers", "a layout of chunks"])


@pytest.mark.slow
def test_more_layouts_of_layers_agree(ranks: RankPool) -> None:
    names = [name for name in DEALS if name not in ("embedding and loss count as layers", "a layout of chunks")]
    assert_deals(ranks, names)


@pytest.mark.slow
def test_a_width_that_ranks_do_not_divide_is_no_matter(ranks: RankPool) -> None:
    """Tensor and sequence parallelism split heads, feed-forwards and tokens, not the hidden states themselves."""
    [expected] = ranks.run(whole, 1, ODD)
    for own in ranks.run(fit, 4, {"tensor_model_parallel_size": 2, "sequence_parallel": True}, ODD):
        assert_same(own, expected, 1e-9)
