"""Process groups: every aligned block of every size, made once, the same on all its members."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from lightning_dcp.errors import PlanError
from lightning_dcp.parallel.groups import CPGroup, ParallelGroups, initialize_groups
from tests.parallel.support import join_world
from tests.support.ranks import RankPool

Described = list[dict[str, Any]]
WORLDS = [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (6, 1), (6, 2), (8, 1), (8, 2)]
DIVISORS = {1: [1], 2: [1, 2], 3: [1, 3], 4: [1, 2, 4], 6: [1, 2, 3, 6], 8: [1, 2, 4, 8]}


def _describe_groups(tensor_parallel: int) -> dict[str, Any]:
    groups = join_world(tensor_parallel)
    return {
        "plane": groups.plane_ranks,
        "rank": groups.rank,
        "plane_handle": dist.get_process_group_ranks(groups.plane),
        "control": dist.get_process_group_ranks(groups.control),
        "speaks": groups.speaks,
        "control_backend": dist.get_backend(groups.control),
        "megatron": dist.get_process_group_ranks(parallel_state.get_data_parallel_group(with_context_parallel=True)),
        "megatron_tensor": dist.get_process_group_ranks(parallel_state.get_tensor_model_parallel_group()),
        "cp": {size: _describe(group) for size, group in groups.cp_groups.items()},
        "granted": _granted(groups),
    }


def _describe(group: CPGroup) -> dict[str, Any]:
    if group.handle is None:
        return {"ranks": group.global_ranks, "size": group.size, "handle": None}
    members = torch.zeros(dist.get_world_size(), dtype=torch.int64)
    members[dist.get_rank()] = 1
    dist.all_reduce(members, group=group.handle)
    return {
        "ranks": group.global_ranks,
        "size": group.size,
        "handle": dist.get_process_group_ranks(group.handle),
        "world_size": dist.get_world_size(group.handle),
        "reached": members.nonzero().flatten().tolist(),
    }


def _granted(groups: ParallelGroups) -> dict[tuple[int, int], tuple[int, ...] | None]:
    """For each block that a plan could name, the ranks of the group that this rank is given; None where refused."""
    granted = {}
    for size in range(1, len(groups.plane_ranks) + 2):
        for first in range(-1, len(groups.plane_ranks) + 1):
            try:
                granted[first, size] = groups.cp_group(first, size).global_ranks
            except PlanError as error:
                assert f"rank {groups.rank} of the plane has no CP group of ranks {first}.." in str(error)
                granted[first, size] = None
    return granted


@pytest.fixture(scope="module", params=WORLDS, ids=lambda sizes: "world {}, TP {}".format(*sizes))
def found(request: pytest.FixtureRequest, ranks: RankPool) -> Described:
    """What each rank has."""
    world, tensor_parallel = request.param
    described = ranks.run(_describe_groups, world, tensor_parallel)
    assert all(len(own["plane"]) == world // tensor_parallel for own in described)
    return described


def test_every_aligned_block_exists_on_exactly_its_members(found: Described) -> None:
    for rank, own in enumerate(found):
        plane = own["plane"]
        assert own["rank"] == plane.index(rank)
        assert all(found[member]["plane"] == plane for member in plane)
        assert sorted(own["cp"]) == DIVISORS[len(plane)]
        for size, group in own["cp"].items():
            first = own["rank"] - own["rank"] % size
            block = plane[first : first + size]
            assert group["ranks"] == block and group["size"] == size
            assert all(found[member]["cp"][size]["ranks"] == block for member in block)
            if size == 1:
                assert group["handle"] is None
            else:
                assert group["handle"] == group["reached"] == list(block)
                assert group["world_size"] == size


def test_a_rank_is_given_its_own_aligned_blocks_and_no_others(found: Described) -> None:
    for own in found:
        plane = own["plane"]
        for (first, size), granted in own["granted"].items():
            aligned = size in DIVISORS[len(plane)] and first % size == 0 and 0 <= first <= own["rank"] < first + size
            assert granted == (plane[first : first + size] if aligned else None), (first, size)


def test_megatrons_state_is_of_the_same_plane_and_the_control_group_of_the_world(found: Described) -> None:
    tensor_parallel = len(found) // len(found[0]["plane"])
    for rank, own in enumerate(found):
        assert own["megatron"] == list(own["plane"])
        assert own["plane_handle"] == list(own["plane"])
        assert own["control"] == list(range(len(found)))
        assert own["control_backend"] == "gloo"
        assert own["speaks"] == (rank % tensor_parallel == 0)
        start = rank - rank % tensor_parallel
        assert own["megatron_tensor"] == list(range(start, start + tensor_parallel))


def _make_groups_twice() -> tuple[int, list[int]]:
    before = join_world()
    groups = initialize_groups(before.topology)
    total = torch.tensor([groups.rank + 1])
    dist.all_reduce(total, group=groups.cp_group(0, 2).handle)
    return int(total), dist.get_process_group_ranks(parallel_state.get_data_parallel_group(with_context_parallel=True))


def test_groups_can_be_made_again(ranks: RankPool) -> None:
    assert ranks.run(_make_groups_twice, 2, timeout=60) == [(3, [0, 1])] * 2


def _exchange_on_the_last_two() -> int:
    groups = join_world()
    if groups.rank < 2:
        return -1
    group = groups.cp_group(2, 2)
    other = group.global_ranks[1 - (groups.rank - 2)]
    received = torch.empty(1, dtype=torch.int64)
    ops = [
        dist.P2POp(dist.isend, torch.tensor([groups.rank]), other, group.handle),
        dist.P2POp(dist.irecv, received, other, group.handle),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return int(received)


def test_the_first_exchange_of_a_group_needs_no_other_rank(ranks: RankPool) -> None:
    assert ranks.run(_exchange_on_the_last_two, 4, timeout=30) == [-1, -1, 3, 2]
