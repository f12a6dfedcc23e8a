"""Planning and watching in a strategy: the scheduler, ring orders, and what changes them between steps."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_dcp import module_checks
from lightning_dcp.schedule import Scheduler
from lightning_dcp.schedule.choice import SchedulerChoice
from lightning_dcp.schedule.relaxed import Relaxed
from lightning_dcp.stability.governor import Fallback
from lightning_dcp.step.ahead import PlanAhead
from lightning_dcp.step.control import StepControl
from lightning_dcp.strategy.boundaries import PlanSettler
from lightning_dcp.strategy.state import StrategyState


class Planning(StrategyState):
    """Makes what plans steps, and replaces it when ranks turn out to be slow."""

    def _new_control(self, *, fitting: bool) -> StepControl:
        """Ring orders; and, when training, the watch over hops."""
        device = self.root_device
        self._choice = replace(
            self._choice, rank_speeds=self.scheduler_choice.rank_speeds
        )  # a run before may have changed it
        orders, table = self.steadiness.orders(self.groups, device, rank_zero_info)
        watch = None
        if fitting:
            watch = self.steadiness.watch(
                self.groups,
                device,
                orders,
                table,
                takes_speeds=self._choice.kind == "dynamic",
                rank_speeds=self._choice.rank_speeds,
                ring=self.attention_settings.scheme in ("auto", "ring") and not module_checks.attends_by_engine(self),
                deterministic=torch.are_deterministic_algorithms_enabled(),
            )
        self.clock.recorder = None if watch is None else watch.recorder
        return StepControl(orders, table, watch, speaks=self.global_rank == 0)

    def _new_planner(self) -> PlanAhead:
        self._planned_by = self.control.state
        return PlanAhead(
            self._new_scheduler(self._choice),
            self.topology.plane_size,
            enabled=self.plan_ahead,
            alignment=self._alignment,
            settle=self._new_settler(),
        )

    def _new_settler(self) -> PlanSettler:
        ranks, nodes = self.topology.plane_size, self._plane_ranks_in_node()
        return PlanSettler(self.boundaries, self._choice, ranks, nodes, self.control.state.orders)

    def _new_scheduler(self, choice: SchedulerChoice) -> Scheduler:
        ranks, nodes = self.topology.plane_size, self._plane_ranks_in_node()
        scheduler = choice.build(ranks, nodes, self._alignment)
        stages = self.pipeline_model_parallel_size if self.virtual_pipeline_model_parallel_size else 1
        if stages > 1 and choice.kind in ("dynamic", "static"):
            wished = replace(choice, microbatch_multiple=math.lcm(choice.microbatch_multiple, stages))
            scheduler = Relaxed(wished.build(ranks, nodes, self._alignment), scheduler)
        return scheduler

    def _state_in_force(self) -> Fallback:
        """Ring orders, exchange schemes and speeds for the next batch; new ones need new plans and layouts."""
        state = self.control.state
        if self._planner is not None and state is not self._planned_by:
            self._planned_by = state
            self._choice = replace(self._choice, rank_speeds=state.rank_speeds)
            self._planner.replace_scheduler(self._new_scheduler(self._choice), self._new_settler())
        return state

    def _plane_ranks_in_node(self) -> int | None:
        """Ranks of the plane in one node, with several: those of a tensor-parallel group lie next to each other."""
        return max(1, self.num_processes // self.tensor_model_parallel_size) if self.num_nodes > 1 else None
