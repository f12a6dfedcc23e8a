"""Process groups: TP, PP, DP and CP from Megatron-Core, and the CP sub-groups of every size."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from lightning_dcp.errors import PlanError
from lightning_dcp.parallel.topology import Topology


@dataclass(frozen=True)
class CPGroup:
    """One CP group: an aligned block of ranks of the plane.

    Attributes:
        handle: its process group; None for a group of one rank, which never communicates.
        global_ranks: its ranks in the world, by place in the group.
    """

    handle: dist.ProcessGroup | None
    global_ranks: tuple[int, ...]

    @property
    def size(self) -> int:
        """Ranks of the group, c."""
        return len(self.global_ranks)


@dataclass(frozen=True)
class ParallelGroups:
    """Every group that a rank needs during training; all are made once, at set-up.

    Attributes:
        topology: the sizes in force.
        plane: this rank's DPxCP plane.
        control: a gloo group over the whole world, for small CPU messages (plans, logged values).
        world_ranks: all ranks, in the order of that group.
        plane_ranks: the plane's ranks in the world.
        rank: this rank's place in the plane.
        cp_groups: for each size the group that this rank belongs to.
        speaks: whether this rank tells what its place in the plane computed: tensor-parallel ranks compute the same, and of a
            pipeline only the last stage sees losses.
        expert_data: the ranks that hold the same experts.
        tensor: the tensor-parallel group; None for one rank.
        pipeline: the stages that this rank's micro-batches go through; None for one stage.
    """

    topology: Topology
    plane: dist.ProcessGroup
    control: dist.ProcessGroup
    plane_ranks: tuple[int, ...]
    rank: int
    cp_groups: dict[int, CPGroup]
    world_ranks: tuple[int, ...] = ()
    speaks: bool = True
    expert_data: dist.ProcessGroup | None = None
    tensor: dist.ProcessGroup | None = None
    pipeline: dist.ProcessGroup | None = None

    def cp_group(self, first_rank: int, size: int) -> CPGroup:
        """This rank's group of a planned size.

        Raises:
            PlanError: the plan names a block that was never made, or that this rank is not in.
        """
        group = self.cp_groups.get(size)
        block = self.plane_ranks[first_rank : first_rank + size]
        if group is None or group.global_ranks != block:
            raise PlanError(
                f"rank {self.rank} of the plane has no CP group of ranks {first_rank}..{first_rank + size - 1}"
            )
        return group


def in_force(groups: ParallelGroups, topology: Topology) -> bool:
    """Whether groups made before are still those of the world, of Megatron-Core and of these sizes."""
    from megatron.core import parallel_state

    return (
        groups.topology == topology
        and parallel_state.model_parallel_is_initialized()
        and parallel_state.get_data_parallel_group(with_context_parallel=True) is groups.plane
        and dist.get_world_size() == len(groups.world_ranks)
    )


def initialize_groups(topology: Topology, timeout: timedelta | None = None) -> ParallelGroups:
    """Make all groups. Collective: every rank of the world calls it, after ``init_process_group``.

    Megatron-Core makes TP, PP, DP and the static CP groups; code that asks its ``parallel_state`` finds them there.
    Its own function for the dynamic sub-groups is not used: it makes wrong ones on planes that are no power of two.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron-Core reports each accelerator package that is not installed
        from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=topology.tensor_model_parallel_size,
        pipeline_model_parallel_size=topology.pipeline_model_parallel_size,
        context_parallel_size=topology.context_parallel_size,
        virtual_pipeline_model_parallel_size=topology.virtual_pipeline_model_parallel_size,
        expert_model_parallel_size=topology.expert_model_parallel_size,
        expert_tensor_parallel_size=topology.expert_tensor_parallel_size,
        distributed_timeout_minutes=max(1, round((timeout or default_pg_timeout).total_seconds() / 60)),
        create_gloo_process_groups=False,
    )
    plane = parallel_state.get_data_parallel_group(with_context_parallel=True)
    planes = _gather_planes(tuple(dist.get_process_group_ranks(plane)))
    own = next(ranks for ranks in planes if dist.get_rank() in ranks)
    world = tuple(range(dist.get_world_size()))
    control = dist.new_group(list(world), timeout=timeout, backend="gloo")
    tensor, pipeline = topology.tensor_model_parallel_size > 1, topology.pipeline_model_parallel_size > 1
    return ParallelGroups(
        topology,
        plane,
        control,
        own,
        own.index(dist.get_rank()),
        _cp_groups(planes, own, plane, timeout),
        world,
        speaks=parallel_state.get_tensor_model_parallel_rank() == 0
        and parallel_state.is_pipeline_last_stage(ignore_virtual=True),
        expert_data=parallel_state.get_expert_data_parallel_group(),
        tensor=parallel_state.get_tensor_model_parallel_group() if tensor else None,
        pipeline=parallel_state.get_pipeline_model_parallel_group() if pipeline else None,
    )


def _gather_planes(own: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The ranks of every plane of the world, in one order on all ranks."""
    planes: list[tuple[int, ...] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(planes, own)
    return sorted({ranks for ranks in planes if ranks is not None})


def _cp_groups(
    planes: list[tuple[int, ...]], own: tuple[int, ...], plane: dist.ProcessGroup, timeout: timedelta | None
) -> dict[int, CPGroup]:
    """This rank's sub-group of each size. Every rank takes part in making every group, in the same order."""
    rank = dist.get_rank()
    groups = {1: CPGroup(None, (rank,))}
    sizes = [c for c in range(2, len(own)) if len(own) % c == 0]
    for size in sizes:
        blocks = [ranks[i : i + size] for ranks in planes for i in range(0, len(ranks), size)]
        made = _new_groups(blocks, timeout)
        block = next(block for block in blocks if rank in block)
        groups[size] = CPGroup(made[block], block)
    if len(own) > 1:
        groups[len(own)] = CPGroup(plane, own)
    for group in groups.values():
        if group.handle is not None:
            # NCCL wants all members in a group's first operation, and a ring leaves out ranks without tokens.
            dist.barrier(group=group.handle)
    return groups


def _new_groups(
    blocks: list[tuple[int, ...]], timeout: timedelta | None, backend: str | None = None
) -> dict[tuple[int, ...], dist.ProcessGroup]:
    return {block: dist.new_group(list(block), timeout=timeout, backend=backend) for block in blocks}
