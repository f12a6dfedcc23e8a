"""Sizes of the parallel dimensions, checked before any group is made."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_dcp.errors import Problem
from lightning_dcp.schedule.plan import divisors


@dataclass(frozen=True)
class Topology:
    """How the world is cut.

    Attributes:
        world_size: all ranks.
        tensor_model_parallel_size: ranks that share each layer's weights.
        pipeline_model_parallel_size: stages.
        context_parallel_size: the static CP size; with dynamic CP the size of the static baseline.
        virtual_pipeline_model_parallel_size: chunks of layers on each stage; None for one.
        expert_model_parallel_size: ranks that share a layer's experts.
        expert_tensor_parallel_size: ranks that share an expert's weights; None for as many as the other layers'.
        sequence_parallel: whether tensor-parallel ranks hold parts of the tokens between layers.
    """

    world_size: int
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    context_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int | None = None
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int | None = None
    sequence_parallel: bool = False

    def __str__(self) -> str:
        parts = [f"world {self.world_size}", f"TP {self.tensor_model_parallel_size}"]
        parts[1] += " with sequence parallelism" if self.sequence_parallel else ""
        parts.append(f"PP {self.pipeline_model_parallel_size}")
        if self.virtual_pipeline_model_parallel_size:
            parts[2] += f" in {self.virtual_pipeline_model_parallel_size} chunks"
        if self.expert_model_parallel_size > 1:
            parts.append(f"EP {self.expert_model_parallel_size}")
        return " / ".join(parts)

    @property
    def is_model_parallel(self) -> bool:
        """Whether ranks hold different weights."""
        dense = self.tensor_model_parallel_size, self.pipeline_model_parallel_size
        return max(*dense, self.expert_model_parallel_size, self.expert_tensor_ranks) > 1

    @property
    def is_pipeline(self) -> bool:
        """Whether micro-batches go through stages."""
        return self.pipeline_model_parallel_size > 1

    @property
    def expert_tensor_ranks(self) -> int:
        """Ranks that share an expert's weights."""
        own = self.expert_tensor_parallel_size
        return self.tensor_model_parallel_size if own is None else own

    @property
    def plane_size(self) -> int:
        """Ranks of one DPxCP plane, R = world / (TP x PP)."""
        return self.world_size // (self.tensor_model_parallel_size * self.pipeline_model_parallel_size)

    @property
    def cp_sizes(self) -> list[int]:
        """The CP sizes that a micro-batch can have: all divisors of the plane's size."""
        return list(divisors(self.plane_size))

    def problems(self) -> list[Problem]:
        """What is wrong with these sizes."""
        tp, pp, cp = (
            self.tensor_model_parallel_size,
            self.pipeline_model_parallel_size,
            self.context_parallel_size,
        )
        found = []
        if self.world_size % (tp * pp):
            found.append(
                Problem(
                    f"tensor_model_parallel_size={tp} x pipeline_model_parallel_size={pp}",
                    f"a world of {self.world_size} ranks, which {tp * pp} does not divide",
                    f"use a multiple of {tp * pp} ranks (Trainer(devices=..., num_nodes=...)), or smaller sizes",
                )
            )
        elif self.plane_size % cp:
            found.append(
                Problem(
                    f"context_parallel_size={cp}",
                    f"a DPxCP plane of {self.plane_size} rank(s) (world {self.world_size} / TP {tp} / PP {pp})",
                    f"use one of {self.cp_sizes}, or a multiple of {cp * tp * pp} ranks",
                )
            )
        return found + self._option_problems()

    def _option_problems(self) -> list[Problem]:
        tp, pp, ep = (
            self.tensor_model_parallel_size,
            self.pipeline_model_parallel_size,
            self.expert_model_parallel_size,
        )
        found = []
        virtual = self.virtual_pipeline_model_parallel_size
        if virtual is not None and pp == 1:
            found.append(
                Problem(
                    f"virtual_pipeline_model_parallel_size={virtual}",
                    "pipeline_model_parallel_size=1, a pipeline of one stage",
                    "leave it out, or use pipeline_model_parallel_size of 2 or more",
                )
            )
        if self.sequence_parallel and tp == 1:
            found.append(
                Problem(
                    "sequence_parallel=True",
                    "tensor_model_parallel_size=1: one rank holds all tokens of its shard",
                    "leave it out, or use tensor_model_parallel_size of 2 or more",
                )
            )
        stage = self.world_size // pp
        if not self.world_size % (tp * pp) and stage % (ep * self.expert_tensor_ranks):
            found.append(
                Problem(
                    f"expert_model_parallel_size={ep} x expert_tensor_parallel_size={self.expert_tensor_ranks}",
                    f"{stage} rank(s) in a pipeline stage, which {ep * self.expert_tensor_ranks} does not divide",
                    "use sizes whose product divides world / pipeline_model_parallel_size",
                )
            )
        return found
