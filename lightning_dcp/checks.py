"""What is refused at set-up: all problems at once, each with its remedy."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import nn
from torch.utils.data import DistributedSampler

from lightning_dcp.attention.options import DEFAULT, AttentionOptions
from lightning_dcp.errors import ConfigurationError, Problem, RegionError, raise_problems
from lightning_dcp.models.compiled import COMPILED_CHILD
from lightning_dcp.models.dry_run import Finding, dry_run
from lightning_dcp.models.region import Regions, find_regions
from lightning_dcp.parallel.layout import LAYOUTS, build_layout
from lightning_dcp.schedule import CostModel, load_cost_model, preset
from lightning_dcp.schedule.choice import SchedulerChoice

if TYPE_CHECKING:
    from lightning_dcp.callbacks.scheduler import SchedulerCallback
    from lightning_dcp.strategy import DCPStrategy

_SIZES = (
    "context_parallel_size",
    "max_seqlen_per_dp_cp_rank",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
)


def argument_problems(strategy: DCPStrategy) -> list[Problem]:
    """Arguments that are wrong whatever the machine is."""
    problems = []
    for name in _SIZES:
        value = getattr(strategy, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            problems.append(Problem(f"{name}={value!r}", "not a positive whole number", f"give {name} of 1 or more"))
    if not isinstance(strategy.plan_ahead, bool):
        problems.append(Problem(f"plan_ahead={strategy.plan_ahead!r}", "neither True nor False", "give one of them"))
    choices = {"loss_normalization": ("tokens", "samples", "sum"), "layout": tuple(sorted(LAYOUTS))}
    for name, allowed in choices.items():
        value = getattr(strategy, name)
        if value not in allowed:
            problems.append(Problem(f"{name}={value!r}", "an unknown value", f"use one of {list(allowed)}"))
    problems += _layout_problems(strategy.layout)
    if strategy.region_names == []:
        problems.append(Problem("regions=[]", "no region at all", "leave regions out, or name one"))
    problems += strategy.attention_settings.problems()
    return problems + strategy.scheduler_choice.argument_problems()


def _layout_problems(name: str) -> list[Problem]:
    """What is wrong with a layout of the user's own, found on a small pack."""
    if name not in LAYOUTS:
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
    for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size"):
        if getattr(strategy, name) > 1:
            problems.append(
                Problem(
                    f"{name}={getattr(strategy, name)}",
                    "a strategy that trains plain PyTorch modules, whose weights are not split",
                    f"set {name}=1",
                )
            )
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


def check_module(strategy: DCPStrategy, module: LightningModule, trainer: Trainer) -> Regions:
    """The regions of a module that can be trained.

    Raises:
        ConfigurationError: everything that stands against it.
    """
    problems = list(_step_problems(module, trainer))
    regions = Regions({})
    try:
        regions = find_regions(module, strategy.region_names, forward_overridden=_overrides_forward(module))
    except RegionError as error:
        problems.append(
            Problem(
                f"regions={strategy.region_names}", str(error), "name the module, or add position_ids to its forward"
            )
        )
    mixing = _mixing_layers(regions)
    problems += [_mixing_problem(name, layer) for name, layer in mixing.items()]
    problems += _batch_statistics_problems(module, regions)
    if trainer._accelerator_connector._layer_sync is not None:
        problems.append(
            Problem(
                "sync_batchnorm=True", "batch statistics that would mix packs", "use a norm without batch statistics"
            )
        )
    if problems:  # the run ends here, so attention is looked at where the module is now
        training = trainer.state.fn == TrainerFn.FITTING
        problems += _attention_problems(regions, set(mixing), DEFAULT, training, nullcontext)
    raise_problems(problems)
    return regions


def check_attention(strategy: DCPStrategy, trainer: Trainer) -> None:
    """Call each region once with made-up tokens; for modules on their device, before regions wrap their forward.

    A region that cannot be called so is named at info level, and checked at its first call.

    Raises:
        ConfigurationError: every attention call that cannot run over a CP group, by its layer.
    """
    precision, training = strategy.precision_plugin.forward_context, trainer.state.fn == TrainerFn.FITTING
    raise_problems(_attention_problems(strategy.regions, set(), strategy.attention, training, precision))


def _attention_problems(
    regions: Regions,
    refused: set[str],
    options: AttentionOptions,
    training: bool,
    forward_context: Callable[[], AbstractContextManager[Any]],
) -> list[Problem]:
    """What dry runs of the regions find in layers that are not refused already."""
    findings: dict[tuple[str, Finding], None] = {}
    for region, module in regions.modules.items():
        result = dry_run(module, options, training=training, forward_context=forward_context)
        if result.skipped is not None:
            rank_zero_info(
                f"Attention inside region {region or 'forward'!r} is checked at its first call, not at set-up: "
                f"{result.skipped}"
            )
        for finding in result.findings:
            name = ".".join(filter(None, (region, finding.layer)))
            if not any(name == layer or name.startswith(f"{layer}.") for layer in refused):
                findings[name, replace(finding, layer="")] = None
    return [
        Problem(
            f"layer {name!r} ({finding.kind}) inside a context-parallel region"
            if name
            else f"{finding.kind}.forward as a context-parallel region",
            finding.found,
            finding.remedy,
        )
        for name, finding in findings
    ]


_MIXING = (
    nn.RNNBase,
    nn.RNNCellBase,
    nn.modules.conv._ConvNd,
    nn.modules.batchnorm._NormBase,
    nn.MultiheadAttention,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
)
"""Layers of torch that mix tokens by other means than ``scaled_dot_product_attention``, and would see only a shard."""


def _mixing_layers(regions: Regions) -> dict[str, nn.Module]:
    return {
        ".".join(part for part in (region, *path.split(".")) if part and part != COMPILED_CHILD): layer
        for region, module in regions.modules.items()
        for path, layer in module.named_modules()
        if isinstance(layer, _MIXING)
    }


def _mixing_problem(name: str, layer: nn.Module) -> Problem:
    return Problem(
        f"layer {name!r} ({type(layer).__name__}) inside a context-parallel region",
        "a layer that mixes tokens, of which a rank holds only a part",
        "use scaled_dot_product_attention instead, or name a region that leaves this layer out",
    )


def _batch_statistics_problems(module: LightningModule, regions: Regions) -> Iterable[Problem]:
    inside = {id(layer) for region in regions.modules.values() for layer in region.modules()}
    for path, layer in module.named_modules():
        if isinstance(layer, nn.modules.batchnorm._NormBase) and id(layer) not in inside:
            yield Problem(
                f"layer {path!r} ({type(layer).__name__}), which takes statistics over the batch",
                "a step that sees one pack of the batch at a time",
                "use a norm without batch statistics, such as LayerNorm or RMSNorm",
            )


def _overrides_forward(module: LightningModule) -> bool:
    return type(module).forward is not LightningModule.forward


def _step_problems(module: LightningModule, trainer: Trainer) -> Iterable[Problem]:
    name = type(module).__name__
    if trainer.state.fn == TrainerFn.FITTING and not module.automatic_optimization:
        yield Problem(
            f"manual optimization in {name}",
            "a strategy that runs backward itself, once for each pack of a batch",
            "remove `self.automatic_optimization = False` and return the loss from training_step",
        )
    for step in ("training_step", "validation_step", "test_step", "predict_step"):
        if is_overridden(step, module) and is_param_in_hook_signature(
            getattr(module, step), "dataloader_iter", explicit=True
        ):
            yield Problem(
                f"{name}.{step}(dataloader_iter)", "a strategy that cuts batches", f"take (batch, batch_idx) in {step}"
            )


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
