"""Links between ranks, measured."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_dcp.parallel.links import Link, measure_links, rounded
from tests.parallel.support import join_world
from tests.support.ranks import RankPool


def _measure() -> dict[int, Link]:
    return measure_links(join_world(), torch.device("cpu"))


@pytest.mark.parametrize(("world", "sizes"), [(1, []), (2, [2]), (4, [2, 4]), (6, [2, 3, 6])])
def test_every_size_of_group_is_measured_and_all_ranks_know_the_same(
    ranks: RankPool, world: int, sizes: list[int]
) -> None:
    results = ranks.run(_measure, world)
    assert list(results[0]) == sizes
    assert all(links == results[0] for links in results)
    for link in results[0].values():
        assert 1e-6 < link.latency_s < 10 and 1e5 < link.bandwidth < 1e12
        assert math.frexp(link.latency_s)[0] == math.frexp(link.bandwidth)[0] == 0.5  # powers of two


@pytest.mark.parametrize(("value", "power"), [(1.0, 1.0), (1.4, 1.0), (1.5, 2.0), (3e-5, 2.0**-15), (0.75, 1.0)])
def test_rounding_to_the_next_power_of_two(value: float, power: float) -> None:
    assert rounded(value) == power


def test_a_hops_time_is_latency_and_bytes_over_bandwidth() -> None:
    assert Link(2.0, 10.0).seconds(30) == 5.0
