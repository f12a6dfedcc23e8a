"""What is refused of arguments, sizes and loaders: all problems at once, each with its remedy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch.utils.data import DistributedSampler

from lightning_dcp.errors import ConfigurationError, PlanError, Problem, raise_problems
from lightning_dcp.parallel.layout import BUDGETED, LAYOUTS, build_layout
from lightning_dcp.schedule import Alignment, CostModel, StepPlan, load_cost_model, preset
from lightning_dcp.schedule.choice import SchedulerChoice
from lightning_dcp.schedule.megatron import DEFAULT_DYNAMIC, available_megatron_scheduler

if TYPE_CHECKING:
    from lightning_dcp.callbacks.scheduler import SchedulerCallback
    from lightning_dcp.strategy import DCPStrategy
    from lightning_dcp.strategy.state import StrategyState

_SIZES = (
    "context_parallel_size",
    "max_seqlen_per_dp_cp_rank",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)
_MAY_BE_NONE = ("virtual_pipeline_model_parallel_size", "expert_tensor_parallel_size")


def argument_problems(strategy: DCPStrategy) -> list[Problem]:
    """Arguments that are wrong whatever the machine is."""
    problems = []
    for name in _SIZES:
        value = getattr(strategy, name)
        if value is None and name in _MAY_BE_NONE:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            problems.append(Problem(f"{name}={value!r}", "not a positive whole number", f"give {name} of 1 or more"))
    for name in (
        "distributed_optimizer",
        "plan_ahead",
        "fused_linear_cross_entropy",
        "sequence_parallel",
        "async_checkpoint",
    ):
        if not isinstance(getattr(strategy, name), bool):
            problems.append(
                Problem(f"{name}={getattr(strategy, name)!r}", "neither True nor False", "give one of them")
            )
    if strategy.outputs == "sharded" and strategy.loss_normalization == "samples":
        problems.append(
            Problem(
                'outputs="sharded" with loss_normalization="samples"',
                "a mean over samples, of which a rank holds parts",
                'use outputs="gathered", or a token mean or a sum',
            )
        )
    choices = {
        "loss_normalization": ("tokens", "samples", "sum"),
        "layout": tuple(sorted(LAYOUTS)),
        "outputs": ("gathered", "sharded", "auto"),
    }
    for name, allowed in choices.items():
        value = getattr(strategy, name)
        if not isinstance(value, str) or value not in allowed:
            problems.append(Problem(f"{name}={value!r}", "an unknown value", f"use one of {list(allowed)}"))
    problems += _layout_problems(strategy.layout)
    problems += strategy.boundaries.problems()
    problems += strategy.steadiness.problems()
    problems += _region_problems(strategy.region_names)
    problems += strategy.attention_settings.problems()
    problems += strategy.scheduler_choice.argument_problems()
    return problems + _model_parallel_problems(strategy)


def _model_parallel_problems(strategy: DCPStrategy) -> list[Problem]:
    """Options that do not go with ranks that hold parts of the weights."""
    asked = _split_by(strategy)
    problems = []
    if strategy.distributed_optimizer is True and strategy.outputs in ("sharded", "auto"):
        found = "a trial that compares gradients and puts them back, which this optimizer keeps elsewhere"
        problems.append(
            Problem(f"outputs={strategy.outputs!r} with distributed_optimizer=True", found, 'use outputs="gathered"')
        )
    if not asked:
        return problems
    if strategy.outputs in ("sharded", "auto"):
        found = "steps of split models, which see whole samples only"
        problems.append(Problem(f"outputs={strategy.outputs!r} with {asked}", found, 'use outputs="gathered"'))
    if strategy.fused_linear_cross_entropy is True:
        found = "a head whose weights lie on several ranks"
        remedy = "leave it out: called with labels, Megatron-Core models make no logits of the whole vocabulary"
        problems.append(Problem(f"fused_linear_cross_entropy=True with {asked}", found, remedy))
    choice = strategy.scheduler_choice
    if needs_lockstep(strategy) and choice.kind in ("dynamic", "static") and choice.schedule_mode == "free":
        found = "stages and experts on other ranks, which have to meet in every micro-batch"
        remedy = "leave schedule_mode out, or use schedule_mode='lockstep'"
        problems.append(Problem(f"schedule_mode='free' with {asked}", found, remedy))
    if needs_lockstep(strategy) and choice.kind == "megatron" and available_megatron_scheduler() != DEFAULT_DYNAMIC:
        found = "a scheduler (not DefaultDynamicCPScheduler) that may leave ranks out of a micro-batch, where all have to meet"
        remedy = "leave scheduler out; or install a Megatron-Core with DefaultDynamicCPScheduler (its dev branch)"
        problems.append(Problem(f"scheduler='megatron' with {asked}", found, remedy))
    return problems


def _split_by(strategy: DCPStrategy) -> str:
    """The sizes by which ranks hold parts of the weights, in words."""
    names = "tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size"
    least = dict.fromkeys(names, 1)
    if isinstance(strategy.tensor_model_parallel_size, int):
        least["expert_tensor_parallel_size"] = strategy.tensor_model_parallel_size
    sizes = {name: getattr(strategy, name) for name in least}
    return ", ".join(f"{name}={n}" for name, n in sizes.items() if isinstance(n, int) and n > least[name])


def check_lockstep(strategy: StrategyState, plan: StepPlan) -> None:
    """Refuse a plan in which ranks would wait for ever for ranks that have no pack; schedulers of others make such plans.

    Raises:
        PlanError: under pipeline or expert parallelism, or with experts on more tensor-parallel ranks than the rest, a
            micro-batch that leaves ranks of the plane out.
    """
    if not needs_lockstep(strategy):
        return
    for number, microbatch in enumerate(plan.microbatches):
        busy = sum(pack.cp_size for pack in microbatch)
        if busy < plan.ranks:
            counts = [len(plan.packs_of(rank)) for rank in range(plan.ranks)]
            raise PlanError(
                f"micro-batch {number} of the plan has packs for {busy} of {plan.ranks} ranks; the ranks run {counts} packs "
                f"(scheduled {strategy._choice.name}). Under pipeline_model_parallel_size="
                f"{strategy.pipeline_model_parallel_size}, expert_model_parallel_size={strategy.expert_model_parallel_size} "
                f"and expert_tensor_parallel_size={strategy.topology.expert_tensor_ranks} stages and experts of all "
                "ranks meet in every micro-batch: make plans "
                "of mode lockstep, or use scheduler='dynamic'."
            )


def _region_problems(names: Any) -> list[Problem]:
    """What is wrong with the names of regions, whatever the module is."""
    asked = f"regions={names!r}"
    if names is None:
        return []
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        return [Problem(asked, "no list of names", 'give a list of attribute paths, such as ["policy", "reference"]')]
    if not names:
        return [Problem(asked, "no region at all", "leave regions out, or name one")]
    doubled = {name for name in names if names.count(name) > 1}
    nested = {a for a in names for b in names if a != b and (not b or a.startswith(f"{b}."))}
    if doubled or nested:
        found = f"{sorted(doubled | nested)} named twice, or inside another region"
        return [Problem(asked, found, "name each module once, and none inside another")]
    return []


def _layout_problems(name: str) -> list[Problem]:
    """What is wrong with a layout of the user's own, found on a small pack."""
    if not isinstance(name, str) or name not in LAYOUTS:
        return []  # refused above
    try:
        build_layout(name, (7, 1, 40), 2)
    except Exception as error:
        remedy = "its function takes lengths and a number of ranks, and returns PackLayout.from_chunks(lengths, chunks)"
        return [Problem(f"layout={name!r} for samples of 7, 1 and 40 tokens on 2 ranks", repr(error), remedy)]
    return []


def cost_model_of(source: CostModel | str | Path | None) -> tuple[CostModel, list[Problem]]:
    """The cost model that was asked for, and what is wrong with it (then a default stands in for it)."""
    default = preset("h100")
    if source is not None and not isinstance(source, CostModel | str | Path):
        remedy = "give a CostModel, the name of a preset, or a YAML file"
        return default, [Problem(f"cost_model={source!r}", f"a {type(source).__name__}", remedy)]
    try:
        return (default if source is None else load_cost_model(source)), []
    except ConfigurationError as error:
        return default, list(error.problems)


def schedule_mode_in_force(strategy: DCPStrategy, scheduler: Any, mode: str | None) -> Any:
    """What was asked for, or what pipelines and expert parallelism need."""
    ours = scheduler is None or scheduler in ("dynamic", "static")
    return mode or ("lockstep" if ours and needs_lockstep(strategy) else "free")


def needs_lockstep(strategy: StrategyState) -> bool:
    """Whether all ranks of the plane must run the same number of micro-batches."""
    sizes = strategy.pipeline_model_parallel_size, strategy.expert_model_parallel_size
    if any(isinstance(size, int) and size > 1 for size in sizes):
        return True
    dense, experts = strategy.tensor_model_parallel_size, strategy.expert_tensor_parallel_size
    return isinstance(experts, int) and isinstance(dense, int) and experts > dense  # an expert's ranks have other packs


def choice_in_force(choice: SchedulerChoice, callback: SchedulerCallback) -> SchedulerChoice:
    """The strategy's choice of a scheduler, or the callback's own scheduler in its place.

    Raises:
        ConfigurationError: both have one, or the strategy has options that the callback's scheduler would not see.
    """
    if callback.scheduler is None:
        return choice
    own = replace(choice, scheduler=callback.scheduler)
    if choice.scheduler is None:
        raise_problems(own.argument_problems())
        return own
    asked = f"DCPStrategy(scheduler=...) and SchedulerCallback({own.name.removeprefix('by ')})"
    raise ConfigurationError([Problem(asked, "two schedulers for one run", "leave one of them out")])


def launch_problems(strategy: DCPStrategy) -> list[Problem]:
    """What is wrong with the sizes on this many devices; known before any process is started."""
    topology = strategy.topology
    problems = topology.problems()
    if not problems:
        problems += strategy.scheduler_choice.plane_problems(topology.plane_size)
        problems += strategy.steadiness.plane_problems(topology.plane_size)
    if topology.world_size > 1 and strategy._start_method == "popen" and _is_interactive():
        problems.append(
            Problem(
                f"{topology.world_size} processes that run the script again",
                "an interactive session (IPython or a notebook), which has no script to run",
                "use strategy='dcp_notebook' or DCPStrategy(start_method='fork'); or start a script, directly or by torchrun",
            )
        )
    return problems


def _is_interactive() -> bool:
    from lightning.fabric.utilities.imports import _IS_INTERACTIVE

    return bool(_IS_INTERACTIVE)


def checkpoint_problems(strategy: DCPStrategy, *, sharded: bool) -> list[Problem]:
    """Ways to write checkpoints that do not fit the module."""
    if strategy.async_checkpoint and not sharded:
        return [
            Problem(
                "async_checkpoint=True",
                "a module without a MegatronModel, whose checkpoints are Lightning's own files",
                "give checkpoint_io=lightning.pytorch.plugins.AsyncCheckpointIO() instead",
            )
        ]
    if sharded and isinstance(strategy.checkpoint_io, AsyncCheckpointIO):
        return [
            Problem(
                "an AsyncCheckpointIO",
                "a module with a MegatronModel, whose checkpoints are directories that are renamed when all is written",
                "use DCPStrategy(async_checkpoint=True) instead",
            )
        ]
    return []


def alignment_problems(strategy: DCPStrategy, alignment: Alignment) -> list[Problem]:
    """What does not go with the padding that a model's back end needs."""
    problems = alignment.problems(strategy.max_seqlen_per_dp_cp_rank)
    if alignment and strategy.layout == BUDGETED:
        found = f"a back end that needs padding ({alignment}), and cuts samples in its own way"
        problems.append(Problem('layout="budgeted"', found, 'use layout="zigzag"; its shards are audited, too'))
    if alignment and strategy.outputs == "sharded":
        found = f"a back end that needs padding ({alignment}), which a rank's own tokens have no place for"
        problems.append(Problem('outputs="sharded"', found, 'use outputs="gathered" or "auto"'))
    return problems


def loader_problems(dataloader: object) -> list[Problem]:
    """Samplers that would give each rank a part of the data: all ranks must read the same batch."""
    samplers = [
        getattr(dataloader, "sampler", None),
        getattr(dataloader, "batch_sampler", None),
        getattr(getattr(dataloader, "batch_sampler", None), "sampler", None),
    ]
    replicas = {s.num_replicas for s in samplers if isinstance(s, DistributedSampler) and s.num_replicas != 1}
    return [
        Problem(
            f"a DistributedSampler over {n} replicas",
            "a strategy under which every rank reads the same batch and the scheduler cuts it",
            "leave the sampler out, or use DistributedSampler(num_replicas=1, rank=0)",
        )
        for n in sorted(replicas)
    ]
