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
    """

    world_size: int
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    context_parallel_size: int = 1

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
        return found
