"""The four patterns of communication: the same on real ranks and in a played group."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dcp.parallel.clock import WaitClock
from lightning_dcp.parallel.exchange import Exchange, GroupExchange
from lightning_dcp.parallel.played import PlayedGroup
from tests.parallel.support import join_world
from tests.support.ranks import RankPool

TOKENS = {2: [3, 5], 3: [2, 0, 4], 4: [1, 0, 2, 3]}


def share(rank: int, tokens: list[int]) -> Tensor:
    """Numbers that tell rank, token and column."""
    rows = torch.arange(tokens[rank], dtype=torch.float64).unsqueeze(1)
    return 100.0 * rank + 10 * rows + torch.arange(2, dtype=torch.float64)


def everything(exchange: Exchange, tokens: list[int]) -> dict[str, Any]:
    """One of each pattern, and two hops under way at the same time."""
    rank, size = exchange.rank, exchange.size
    own, before = share(rank, tokens), (rank - 1) % size
    first = exchange.start_hop([own, own[:, :1]], tokens[before], tag=0)
    second = exchange.start_hop([-own], tokens[before], tag=1)
    (negative,), (came, column) = second.wait(), first.wait()
    on = exchange.start_hop([came, column], tokens[(rank - 2) % size], tag=0).wait()  # what came in, handed on
    gathered = exchange.all_gather(own, tokens)
    parts = [torch.full((rank + 1, to), 10.0 * rank + to) for to in range(size)]
    swapped = exchange.all_to_all(parts, [(source + 1, rank) for source in range(size)])
    reduced = exchange.reduce_scatter(gathered * (rank + 1), tokens)
    return {
        "hop": [came, column, negative],
        "on": on,
        "gathered": gathered,
        "swapped": swapped,
        "reduced": reduced,
    }


def assert_everything(results: list[dict[str, Any]], tokens: list[int]) -> None:
    size = len(tokens)
    shares = [share(rank, tokens) for rank in range(size)]
    for rank, got in enumerate(results):
        before, second = shares[rank - 1], shares[rank - 2]
        for tensor, expected in zip(got["hop"], (before, before[:, :1], -before), strict=True):
            assert torch.equal(tensor, expected)
        assert torch.equal(got["on"][0], second) and torch.equal(got["on"][1], second[:, :1])
        assert torch.equal(got["gathered"], torch.cat(shares))
        for source, part in enumerate(got["swapped"]):
            assert torch.equal(part, torch.full((source + 1, rank), 10.0 * source + rank))
        assert torch.equal(got["reduced"], shares[rank] * sum(range(1, size + 1)))


def _on_groups(tokens: list[int], first: int) -> dict[str, Any] | None:
    groups = join_world()
    size = len(tokens)
    if not first <= groups.rank < first + size:
        return None
    clock = WaitClock()
    results = everything(GroupExchange(groups.cp_group(first, size), groups.rank - first, clock), tokens)
    assert clock.seconds > 0
    return results


@pytest.mark.parametrize(("world", "size", "first"), [(2, 2, 0), (4, 2, 2), (3, 3, 0), (4, 4, 0)])
def test_on_ranks(ranks: RankPool, world: int, size: int, first: int) -> None:
    results = ranks.run(_on_groups, world, TOKENS[size], first)
    assert_everything(results[first : first + size], TOKENS[size])


def _native(tokens: list[int]) -> Tensor:
    """The path that NCCL takes, which gloo can walk too."""
    groups = join_world()
    exchange = GroupExchange(groups.cp_group(0, len(tokens)), groups.rank, WaitClock())
    gathered = exchange.all_gather(share(groups.rank, tokens), tokens)
    native = exchange._native_reduce_scatter((gathered * (groups.rank + 1)).split(tokens), max(tokens))
    own = exchange.reduce_scatter(gathered * (groups.rank + 1), tokens)
    assert torch.equal(native, own)
    return native


def test_the_native_reduce_scatter_gives_the_same(ranks: RankPool) -> None:
    for rank, got in enumerate(ranks.run(_native, 3, TOKENS[3])):
        assert torch.equal(got, 6 * share(rank, TOKENS[3]))


@pytest.mark.parametrize("size", TOKENS)
def test_in_a_played_group(size: int) -> None:
    played = PlayedGroup(size)
    results = played.run(lambda exchange: everything(exchange, TOKENS[size]))
    assert_everything(results, TOKENS[size])
    assert all(rank.busy_seconds > 0 for rank in played.ranks)


def test_alone_nothing_is_sent() -> None:
    own = torch.ones(3, 2)
    exchange = GroupExchange(PlayedGroup(1).group, 0, WaitClock())
    assert exchange.all_gather(own, [3]) is own
    assert exchange.reduce_scatter(own, [3]) is own
    assert exchange.all_to_all([own], [(3, 2)])[0] is own


def test_a_played_group_counts_what_is_sent_to_others() -> None:
    played = PlayedGroup(3)
    played.run(lambda exchange: exchange.all_gather(torch.zeros(4, 2), [4, 4, 4]))
    played.run(lambda exchange: exchange.start_hop([torch.zeros(5), torch.zeros(0)], 5, tag=0).wait())
    assert [rank.messages for rank in played.ranks] == [[32, 32, 20]] * 3
    assert played.ranks[0].sent_bytes == 84


def _fail(exchange: Exchange) -> Tensor:
    if exchange.rank == 1:
        raise ZeroDivisionError("rank 1")
    return exchange.all_gather(torch.zeros(1), [1, 1, 1])


def test_the_first_failure_ends_a_played_group_and_is_raised() -> None:
    played = PlayedGroup(3)
    with pytest.raises(ZeroDivisionError, match="rank 1"):
        played.run(_fail)
    assert len(played.run(lambda exchange: exchange.rank)) == 3  # and it can be used again


def _backend_name() -> str:
    join_world()
    return str(dist.get_backend())


def test_the_tests_run_over_gloo(ranks: RankPool) -> None:
    assert ranks.run(_backend_name, 2) == ["gloo", "gloo"]
