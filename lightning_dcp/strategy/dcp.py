"""The strategy: its arguments, set-up and end."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor

from lightning_dcp import checks, module_checks
from lightning_dcp.attention.options import AttentionOptions
from lightning_dcp.attention.settings import AttentionSettings
from lightning_dcp.boundaries.budget import BoundaryBudget
from lightning_dcp.callbacks.scheduler import SchedulerCallback
from lightning_dcp.data.prepare import prepare_loader
from lightning_dcp.errors import raise_problems
from lightning_dcp.launcher import DCPSubprocessLauncher
from lightning_dcp.loss.weighting import LossNormalization
from lightning_dcp.models.megatron.alignment import agreed_alignment
from lightning_dcp.models.megatron.checkpoint import ShardedCheckpoints
from lightning_dcp.models.megatron.distributed_optimizer import DistributedOptimizer
from lightning_dcp.models.megatron.dtypes import precision_problems
from lightning_dcp.models.megatron.gradients import sync_parameters
from lightning_dcp.models.megatron.processes import check_processes
from lightning_dcp.models.region import Regions
from lightning_dcp.parallel.clock import WaitClock
from lightning_dcp.parallel.groups import ParallelGroups, in_force, initialize_groups
from lightning_dcp.parallel.watchdog import Watchdog
from lightning_dcp.schedule import CostModel, Scheduler
from lightning_dcp.schedule.alignment import NO_ALIGNMENT
from lightning_dcp.schedule.choice import SchedulerChoice
from lightning_dcp.stability.governor import Fallback
from lightning_dcp.stability.settings import AlarmSettings
from lightning_dcp.step.ahead import PlanAhead
from lightning_dcp.step.audit_log import AuditLog
from lightning_dcp.step.control import StepControl
from lightning_dcp.step.metrics import release_metrics
from lightning_dcp.step.outputs_choice import GATHERED, OutputsChoice, gradient_tolerance
from lightning_dcp.strategy.boundaries import BoundaryChoice
from lightning_dcp.strategy.checkpoints import CheckpointHooks
from lightning_dcp.strategy.optimization import OptimizationHooks
from lightning_dcp.strategy.steadiness import SteadinessChoice
from lightning_dcp.strategy.steps import StepHooks


class DCPStrategy(StepHooks, OptimizationHooks, CheckpointHooks):
    """Dynamic context parallelism: each packed micro-batch gets its own context-parallel (CP) size.

    Every rank reads the same batch. A scheduler cuts it into packs of whole samples, each for an aligned group of
    ranks; ``training_step`` runs once for each pack of this rank and sees whole samples in the loader's own format.
    Loss, gradients, logged values and predictions are those of one process that saw the whole batch.

    Args:
        context_parallel_size: CP size of every pack with ``dynamic_context_parallel=False``; must divide the plane. With
            dynamic CP the scheduler chooses among all sizes that divide the plane, and this is only the size of
            Megatron-Core's static CP groups.
        dynamic_context_parallel: choose the CP size per pack. ``False`` is the static baseline, by the same code.
        scheduler: what plans each batch: ``dynamic`` (the default), ``static`` (the default with
            ``dynamic_context_parallel=False``), or ``megatron`` (the scheduler of the installed Megatron-Core). Or your
            own: an object with ``schedule(lengths) -> StepPlan`` (in YAML by ``class_path`` and ``init_args``), or a
            function or class from the plane's number of ranks to one. It decides alone, and its plans are checked;
            :class:`~lightning_dcp.SchedulerCallback` says when it is called.
        max_seqlen_per_dp_cp_rank: most tokens of one micro-batch that a rank holds: what bounds memory. A sample may
            be as long as this times the largest group.
        tensor_model_parallel_size: ranks that share each layer's weights.
        sequence_parallel: tensor-parallel ranks hold parts of the tokens between layers.
        pipeline_model_parallel_size: pipeline stages. ``training_step`` runs on all of them; before the last stage it ends
            where it calls the model.
        virtual_pipeline_model_parallel_size: chunks of layers that each stage holds, for the interleaved schedule.
        expert_model_parallel_size: ranks that a mixture-of-experts layer's experts are dealt out to.
        expert_tensor_parallel_size: ranks that share an expert's weights; by default ``tensor_model_parallel_size``.
            These six are for Megatron-Core models (:class:`~lightning_dcp.MegatronModel`).
        distributed_optimizer: Megatron-Core's: each rank of the plane keeps the optimizer state of its share of the models'
            weights, in float32, and updates it. For Megatron-Core models in float32 or bfloat16 and one
            ``torch.optim.AdamW`` from ``configure_optimizers``, whose settings and schedulers stay in force. These weights
            have no ``.grad``; clipping and :meth:`gradient_norm` know their gradients.
        loss_normalization: what the loss that ``training_step`` returns is over one batch: a mean over target
            ``tokens``, a mean over ``samples``, or a ``sum``.
        layout: how the tokens of a pack lie on its ranks: ``zigzag`` balances causal work, ``contiguous`` does not;
            ``budgeted`` cuts samples that have segments at their borders, keeps dense segments on one rank and each rank's
            shard inside ``boundary_budget``; or a name that was added to :data:`lightning_dcp.parallel.layout.LAYOUTS`.
        boundary_budget: what a shard may hold, a :class:`~lightning_dcp.BoundaryBudget`. Every plan is audited against it
            before anything is sent, whatever the layout is; with ``layout="budgeted"`` the default one is used if none is given.
        on_violation: what is done about a plan whose shards break the budget: ``warn``, ``replan`` (another plan for the
            batch, if there is one that keeps it), or ``error``.
        ring_order: in which order a ring visits the ranks of its group: ``rank``, ``measured`` (the links between all ranks
            are measured at set-up, and each group takes the order whose slowest hop is fastest), or a list of the plane's
            ranks. Of orders that are equally fast each pack takes the one that sends its densest shards over the fastest links.
        links_file: where measured links are kept: read if they are of these ranks and machines, else written.
        hop_timing: time every hop and collective of training steps, at less than a hundredth of a step: what alarms, the
            fallback and :class:`~lightning_dcp.StabilityMonitor` rest on.
        alarms: what makes a link or a rank slow, a :class:`~lightning_dcp.AlarmSettings`. Alarms are logged.
        fallback: while a link is slow, rings go around it, or groups that cannot use another exchange scheme; while a rank is
            slow, the dynamic scheduler gives it less work. All is undone when it is over. Not with
            ``Trainer(deterministic=True)``, where nothing may follow from times.
        attention: how keys and values reach the queries of other ranks: ``ring``, ``all_gather``, ``ulysses``, or ``auto``,
            which estimates all three for each pack, group and layer from the cost model, the head counts and the links.
            What it picked is logged, and counted in :class:`~lightning_dcp.RunSummary`.
            Transformer Engine's attention chooses nothing: ``auto`` is ``ring`` there, and the next two are refused.
        attention_kernel: what computes attention on a rank; ``auto`` takes the fastest for device and dtype that is
            installed: ``flash_attn_3``, ``flash_attn``, ``cuda_flash``, ``varlen_attn``, ``cpu_flash``, ``reference``.
        links: how ``attention="auto"`` knows the speed between ranks: ``measured`` at set-up (rounded; runs may still
            choose differently, and then differ in the last bits), from the ``cost_model``, or ``auto``: measured on
            accelerators unless ``Trainer(deterministic=True)``.
        regions: attribute paths of the modules to run context-parallel; found by themselves where it is plain which:
            Hugging Face models, the module's own ``forward``, the only child whose forward takes ``position_ids``.
        outputs: what ``training_step`` sees. ``gathered``: whole samples, so that any loss works. ``sharded``: the tokens
            of this rank alone, labels (``shift_labels``) and masks alike, and nothing is gathered: for losses that are
            means or sums over tokens. ``auto``: both are computed for one pack, and ``sharded`` is used from then on if
            loss, logged values and gradient agree. ``sharded`` is checked in the same way, and refused if they do not.
        fused_linear_cross_entropy: Hugging Face models compute ``.loss`` from hidden states in pieces, without logits
            (``.logits`` is None when labels are given).
        cost_model: what a pack costs on this machine: a :class:`~lightning_dcp.schedule.CostModel`, a YAML file of one
            (``lightning-dcp calibrate`` measures it and writes the file), or ``a100``, ``h100`` (the default), ``h200``
            or ``cpu``: a 7B model there. The dynamic scheduler balances by it; the others do not look at it.
        schedule_mode: ``free``: each rank runs its own list of packs. ``lockstep``: all ranks run the same number of
            micro-batches, none of them without a pack; pipelines and expert parallelism need that, and have it by default.
            For the dynamic and static schedulers, as all that follow but where noted.
        min_context_parallel_size: smallest CP size of a pack; dynamic scheduler only.
        max_context_parallel_size: largest CP size of a pack, by default the plane; dynamic scheduler only.
        microbatch_multiple: the number of micro-batches is made a multiple of this; in lock-step only. With a virtual
            pipeline it is made a multiple of the stages, too, where the batch has enough samples.
        ranks_per_node: ranks of the plane in one node, for groups to stay inside nodes where they can. By default the
            cost model's, or with several nodes the processes of a node over ``tensor_model_parallel_size``. Dynamic
            scheduler only.
        rank_speeds: speed of each rank of the plane, 1.0 for a full share of work; dynamic scheduler only.
        plan_ahead: read each batch while the one before is computed, and plan it in a thread. ``False`` plans at the
            step.
        async_checkpoint: training goes on while a checkpoint is written: its shards are copied to the CPU, and a thread
            writes them. It is waited for before the next one and at the end. For modules with a
            :class:`~lightning_dcp.MegatronModel`, whose checkpoints are directories of shards.
        accelerator: as in Lightning.
        parallel_devices: as in Lightning.
        cluster_environment: as in Lightning.
        checkpoint_io: as in Lightning.
        precision_plugin: as in Lightning.
        process_group_backend: ``gloo`` or ``nccl``; by default by device.
        timeout: of collectives.
        start_method: how Lightning starts the ranks: ``popen`` (run the script again), ``fork`` (notebooks),
            ``spawn`` or ``forkserver``.

    Raises:
        ConfigurationError: all problems of the settings at once; sizes are checked as soon as the Trainer is made.
    """

    strategy_name = "dcp"

    def __init__(
        self,
        context_parallel_size: int = 1,
        *,
        dynamic_context_parallel: bool = True,
        scheduler: Literal["dynamic", "static", "megatron"] | Scheduler | Callable[[int], Scheduler] | None = None,
        max_seqlen_per_dp_cp_rank: int = 8192,
        tensor_model_parallel_size: int = 1,
        sequence_parallel: bool = False,
        pipeline_model_parallel_size: int = 1,
        virtual_pipeline_model_parallel_size: int | None = None,
        expert_model_parallel_size: int = 1,
        expert_tensor_parallel_size: int | None = None,
        distributed_optimizer: bool = False,
        loss_normalization: LossNormalization = "tokens",
        layout: str = "zigzag",
        boundary_budget: BoundaryBudget | None = None,
        on_violation: Literal["warn", "replan", "error"] = "warn",
        ring_order: Literal["rank", "measured"] | list[int] = "rank",
        links_file: str | Path | None = None,
        hop_timing: bool = True,
        alarms: AlarmSettings | None = None,
        fallback: bool = True,
        attention: Literal["auto", "ring", "all_gather", "ulysses"] = "auto",
        attention_kernel: str = "auto",
        links: Literal["auto", "measured", "cost_model"] = "auto",
        regions: list[str] | None = None,
        outputs: Literal["gathered", "sharded", "auto"] = "gathered",
        fused_linear_cross_entropy: bool = False,
        cost_model: CostModel | str | Path | None = None,
        schedule_mode: Literal["free", "lockstep"] | None = None,
        min_context_parallel_size: int = 1,
        max_context_parallel_size: int | None = None,
        microbatch_multiple: int = 1,
        ranks_per_node: int | None = None,
        rank_speeds: list[float] | None = None,
        plan_ahead: bool = True,
        async_checkpoint: bool = False,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
    ) -> None:
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
        )
        self.context_parallel_size = context_parallel_size
        self.dynamic_context_parallel = dynamic_context_parallel
        self.max_seqlen_per_dp_cp_rank = max_seqlen_per_dp_cp_rank
        self.tensor_model_parallel_size = tensor_model_parallel_size
        self.sequence_parallel = sequence_parallel
        self.pipeline_model_parallel_size = pipeline_model_parallel_size
        self.virtual_pipeline_model_parallel_size = virtual_pipeline_model_parallel_size
        self.expert_model_parallel_size = expert_model_parallel_size
        self.expert_tensor_parallel_size = expert_tensor_parallel_size
        self.distributed_optimizer = distributed_optimizer
        self.loss_normalization: LossNormalization = loss_normalization
        self.layout = layout
        self.boundaries = BoundaryChoice(layout, boundary_budget, on_violation)
        self.steadiness = SteadinessChoice(ring_order, links_file, hop_timing, alarms, fallback)
        self.attention_settings = AttentionSettings(attention, attention_kernel, links)
        self.region_names = regions
        self.outputs = outputs
        self.fused_linear_cross_entropy = fused_linear_cross_entropy
        self.plan_ahead = plan_ahead
        self.async_checkpoint = async_checkpoint
        self.cost_model, problems = checks.cost_model_of(cost_model)
        self.scheduler_choice = SchedulerChoice(
            scheduler,
            dynamic_context_parallel,
            context_parallel_size,
            self.boundaries.limit(max_seqlen_per_dp_cp_rank),
            self.cost_model,
            layout,
            min_context_parallel_size=min_context_parallel_size,
            max_context_parallel_size=max_context_parallel_size,
            schedule_mode=checks.schedule_mode_in_force(self, scheduler, schedule_mode),
            microbatch_multiple=microbatch_multiple,
            ranks_per_node=ranks_per_node,
            rank_speeds=tuple(rank_speeds) if isinstance(rank_speeds, list) else rank_speeds,
        )
        self.audits = AuditLog(speaks=False)
        self.clock = WaitClock()
        self.gradient_reductions = 0
        self._groups: ParallelGroups | None = None
        self._checkpoints: ShardedCheckpoints | None = None
        self._attention = AttentionOptions()
        self._alignment = NO_ALIGNMENT
        self._regions: Regions | None = None
        self._choice = self.scheduler_choice
        self._planner: PlanAhead | None = None
        self._control: StepControl | None = None
        self._planned_by: Fallback | None = None
        self._callback: SchedulerCallback | None = None
        self._watchdog: Watchdog | None = None
        self._outputs = GATHERED
        self._warning_filter: Any = None
        self._distributed: DistributedOptimizer | None = None
        self._stash: list[Tensor | None] | None = None
        self._scaled_loss: Tensor | None = None
        self._running_packs = False
        raise_problems(problems + checks.argument_problems(self))

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Every rank reads every batch whole; the scheduler cuts it."""
        return {"num_replicas": 1, "rank": 0}

    def _configure_launcher(self) -> None:
        raise_problems(checks.launch_problems(self))
        if self._start_method != "popen":
            super()._configure_launcher()
        elif self.topology.world_size > 1 and self.cluster_environment is not None:
            self._launcher = DCPSubprocessLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    def connect(self, model: LightningModule) -> None:
        """Connect the module; add the scheduler callback unless the user has."""
        super().connect(model)
        callbacks: list[Any] = model.trainer.callbacks  # type: ignore[attr-defined]
        found = next((callback for callback in callbacks if isinstance(callback, SchedulerCallback)), None)
        if found is None:
            found = SchedulerCallback()
        else:
            callbacks.remove(found)
        callbacks.insert(0, found)  # first, so that its on_exception comes before callbacks that save checkpoints
        self._callback = found
        self._choice = checks.choice_in_force(self.scheduler_choice, found)
        # Every rank reads every batch, so there is nothing to distribute; Lightning's sampler would also shuffle
        # training data that the user did not ask to shuffle.
        model.trainer._accelerator_connector.use_distributed_sampler = False

    def setup_environment(self) -> None:
        """Join the world, make the groups, start to watch the other ranks."""
        super().setup_environment()
        if self._groups is None or not in_force(self._groups, self.topology):
            self._groups = initialize_groups(self.topology, self._timeout)  # else those of the run before
            self._checkpoints = ShardedCheckpoints(self._groups, self.root_device, timeout=self._timeout)
        if self.world_size > 1:
            store = dist.distributed_c10d._get_default_store()
            self._watchdog = Watchdog(store, self.global_rank, self.world_size)
            self._watchdog.start()

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Around ``configure_model``: ranks that wait there for one that failed say which it was."""
        with self._naming_failures():
            yield

    def setup(self, trainer: Trainer) -> None:
        """Check the module, find its regions, and bring it and its optimizers to the device."""
        with self._naming_failures():
            self._set_up(trainer)

    def _set_up(self, trainer: Trainer) -> None:
        self._regions = module_checks.check_module(self, self._module, trainer)
        check_processes(self._module, self, trainer)
        raise_problems(checks.checkpoint_problems(self, sharded=self._sharded is not None))
        self._alignment = agreed_alignment(self._regions.adapters.values(), self.groups)
        raise_problems(checks.alignment_problems(self, self._alignment))
        self._outputs = OutputsChoice(self.outputs, gradient_tolerance(self.precision_plugin.precision))
        if self.loss_normalization == "samples":
            self._outputs.settle_for_samples()
        self._attention = self.attention_settings.build(self.cost_model, self.groups, self.root_device, rank_zero_info)
        self._control = self._new_control(fitting=trainer.state.fn == TrainerFn.FITTING)
        self.audits = AuditLog(speaks=self.global_rank == 0)
        self._planner = self._new_planner()
        if self.accelerator is None or self.model is None:
            raise RuntimeError("setup() needs an accelerator and a model; the Trainer provides both")
        self.accelerator.setup(trainer)
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting and self._layer_sync:
            self.model = self._layer_sync.apply(self.model)
        self.model = self.precision_plugin.convert_module(self.model)
        raise_problems(precision_problems(self._module, self.precision_plugin.precision, self.root_device))
        self.model_to_device()
        sync_parameters(self._module, self.groups)  # what the DDP wrapper, which is not used here, would do
        module_checks.check_attention(self, trainer)
        self._regions.install()
        if fitting:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if fitting:
            _optimizers_to_device(self.optimizers, self.root_device)
            self._distributed = self._make_distributed() if self.distributed_optimizer else None
        # Logged values are joined over all ranks already (lightning_dcp.step.logs), which Lightning cannot know.
        warnings.filterwarnings("ignore", message=r"It is recommended to use `self\.log\(.*sync_dist=True")
        self._warning_filter = warnings.filters[0]
        rank_zero_info(self.describe())

    def describe(self) -> str:
        """The sizes in force, in words."""
        t, limit = self.topology, self._alignment.limit(self.boundaries.limit(self.max_seqlen_per_dp_cp_rank))
        sizes = self._choice.sizes(t.plane_size, self._plane_ranks_in_node())
        parts = [
            f"Context parallelism: {self._choice.name}, sizes {', '.join(map(str, sizes))} on a plane of "
            f"{t.plane_size} rank(s) ({t})",
            f"at most {limit} tokens a rank, {sizes[-1] * limit} a sample",
            self._choice.settings,
            module_checks.describe_attention(self),
            f"loss per {self.loss_normalization}{', without logits' if self.fused_linear_cross_entropy else ''}",
            f"outputs {self.outputs}",
            f"regions: {', '.join(name or 'forward' for name in self.regions.modules)}",
        ]
        if self._alignment:
            parts.insert(2, f"padding of {self._alignment}")
        return "; ".join(parts)

    def process_dataloader(self, dataloader: object) -> object:
        """Give all ranks the same batches; make training loaders resumable inside an epoch; read one batch ahead."""
        raise_problems(checks.loader_problems(dataloader))
        return prepare_loader(dataloader, self._trainer, self._announce if self.plan_ahead else None)

    def _announce(self, batch: Any) -> None:
        if self._planner is not None:
            self._planner.submit(batch)

    def report_failure(self, exception: BaseException) -> None:
        """Tell the other ranks why this one ends; called by the scheduler callback, before callbacks that wait for them."""
        if self._watchdog is not None:
            self._watchdog.report(exception)

    def teardown(self) -> None:
        """Give the module its own ``forward`` back, and end the threads."""
        try:
            self._end_checkpoints()
        finally:
            self._tear_down()

    def _tear_down(self) -> None:
        if self._planner is not None:
            self._planner.close()
        if self._watchdog is not None:
            self._watchdog.stop()
            self._watchdog = None
        if self._regions is not None:
            self._regions.remove()
        if self._warning_filter in warnings.filters:
            warnings.filters.remove(self._warning_filter)  # type: ignore[attr-defined]
        if self.lightning_module is not None:
            release_metrics(self.lightning_module)
        for name in ("clip_grad_by_norm", "clip_grad_by_value"):
            vars(self.precision_plugin).pop(name, None)
        if self._distributed is not None:
            self._distributed.close()
            self._distributed = None
        super().teardown()
