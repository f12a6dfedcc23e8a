"""What the strategy's hooks share: its options, what is made at set-up, and how a rank's failure is told to others."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from lightning_dcp.attention.options import AttentionOptions
from lightning_dcp.attention.settings import AttentionSettings
from lightning_dcp.callbacks.scheduler import SchedulerCallback
from lightning_dcp.loss.weighting import LossNormalization
from lightning_dcp.models.megatron import MegatronAdapter
from lightning_dcp.models.megatron.checkpoint import ShardedCheckpoints
from lightning_dcp.models.megatron.distributed_optimizer import DistributedOptimizer
from lightning_dcp.models.region import Regions
from lightning_dcp.parallel.clock import WaitClock
from lightning_dcp.parallel.groups import ParallelGroups
from lightning_dcp.parallel.topology import Topology
from lightning_dcp.parallel.watchdog import Watchdog
from lightning_dcp.schedule.alignment import Alignment
from lightning_dcp.schedule.choice import SchedulerChoice
from lightning_dcp.stability.governor import Fallback
from lightning_dcp.step.ahead import PlanAhead, PlanCounts
from lightning_dcp.step.audit_log import AuditLog
from lightning_dcp.step.control import StepControl
from lightning_dcp.step.outputs_choice import OutputsChoice
from lightning_dcp.strategy.boundaries import BoundaryChoice
from lightning_dcp.strategy.steadiness import SteadinessChoice


class StrategyState(DDPStrategy):
    """The state of a :class:`~lightning_dcp.DCPStrategy`, whose arguments the attributes without an underscore are."""

    context_parallel_size: int
    dynamic_context_parallel: bool
    max_seqlen_per_dp_cp_rank: int
    tensor_model_parallel_size: int
    sequence_parallel: bool
    pipeline_model_parallel_size: int
    virtual_pipeline_model_parallel_size: int | None
    expert_model_parallel_size: int
    expert_tensor_parallel_size: int | None
    distributed_optimizer: bool
    loss_normalization: LossNormalization
    async_checkpoint: bool
    plan_ahead: bool
    attention_settings: AttentionSettings
    scheduler_choice: SchedulerChoice
    boundaries: BoundaryChoice
    steadiness: SteadinessChoice
    audits: AuditLog
    clock: WaitClock
    gradient_reductions: int
    _groups: ParallelGroups | None
    _checkpoints: ShardedCheckpoints | None
    _attention: AttentionOptions
    _alignment: Alignment
    _regions: Regions | None
    _choice: SchedulerChoice
    _planner: PlanAhead | None
    _control: StepControl | None
    _planned_by: Fallback | None
    _callback: SchedulerCallback | None
    _watchdog: Watchdog | None
    _outputs: OutputsChoice
    _distributed: DistributedOptimizer | None
    _stash: list[Tensor | None] | None
    _scaled_loss: Tensor | None
    _running_packs: bool

    @property
    def topology(self) -> Topology:
        """The sizes in force."""
        return Topology(
            self.num_nodes * self.num_processes,
            self.tensor_model_parallel_size,
            self.pipeline_model_parallel_size,
            self.context_parallel_size,
            self.virtual_pipeline_model_parallel_size,
            self.expert_model_parallel_size,
            self.expert_tensor_parallel_size,
            self.sequence_parallel,
        )

    @property
    def groups(self) -> ParallelGroups:
        """The process groups; made at set-up."""
        if self._groups is None:
            raise RuntimeError("the process groups are made when a run starts")
        return self._groups

    @property
    def regions(self) -> Regions:
        """The context-parallel regions; found at set-up."""
        if self._regions is None:
            raise RuntimeError("the regions are found when a run starts")
        return self._regions

    @property
    def attention(self) -> AttentionOptions:
        """How attention is computed; settled at set-up."""
        return self._attention

    @property
    def callback(self) -> SchedulerCallback:
        """The callback that owns the scheduler."""
        if self._callback is None:
            raise RuntimeError("the scheduler callback is connected when a run starts")
        return self._callback

    @property
    def control(self) -> StepControl:
        """Ring orders, and the watch over training steps; made at set-up."""
        if self._control is None:
            raise RuntimeError("ring orders are known when a run starts")
        return self._control

    @property
    def plan_counts(self) -> PlanCounts:
        """How many plans of this run were ready before their steps, and how long steps waited for plans."""
        if self._planner is None:
            raise RuntimeError("plans are counted when a run starts")
        return self._planner.counts

    @property
    def _module(self) -> LightningModule:
        if self.lightning_module is None:
            raise RuntimeError("no LightningModule is connected yet")
        return self.lightning_module

    @property
    def _trainer(self) -> Trainer:
        return self._module.trainer

    @property
    def _has_megatron(self) -> bool:
        return any(isinstance(adapter, MegatronAdapter) for adapter in self.regions.adapters.values())

    @property
    def _pipeline(self) -> MegatronAdapter:
        """The model whose stages micro-batches go through; set-up has seen to it that there is one."""
        return next(adapter for adapter in self.regions.adapters.values() if isinstance(adapter, MegatronAdapter))

    def _naming_failures(self) -> AbstractContextManager[None]:
        return nullcontext() if self._watchdog is None else self._watchdog.naming_failures()
