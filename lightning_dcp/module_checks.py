"""What is refused of the user's module: its steps, regions, layers and attention, all problems at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import nn

from lightning_dcp.attention.options import DEFAULT, AttentionOptions
from lightning_dcp.attention.settings import describe
from lightning_dcp.attention.transformer_engine import te_ring_order_problem
from lightning_dcp.errors import Problem, RegionError, raise_problems
from lightning_dcp.models.discovery import find_regions
from lightning_dcp.models.dry_run import Finding, dry_run
from lightning_dcp.models.megatron.alignment import has_transformer_engine_attention
from lightning_dcp.models.megatron.arrangement import arrangement_problems, compiled_problems, region_problems
from lightning_dcp.models.megatron.te_attention import scheme_in_force
from lightning_dcp.models.mixing import lies_in, mixing_problem
from lightning_dcp.models.region import Regions

if TYPE_CHECKING:
    from lightning_dcp.strategy import DCPStrategy
    from lightning_dcp.strategy.state import StrategyState


def check_module(strategy: DCPStrategy, module: LightningModule, trainer: Trainer) -> Regions:
    """The regions of a module that can be trained.

    Raises:
        ConfigurationError: everything that stands against it.
    """
    problems = [
        *_step_problems(module, trainer),
        *_backward_problems(module, trainer, strategy),
        *arrangement_problems(module, strategy.topology),
    ]
    regions = Regions({})
    if any(compiled_problems(module)):
        raise_problems(problems)  # no region of a Megatron-Core model lies outside compiled code
    try:
        regions = find_regions(
            module,
            strategy.region_names,
            forward_overridden=_overrides_forward(module),
            fused_linear_cross_entropy=strategy.fused_linear_cross_entropy,
        )
    except RegionError as error:
        problems.append(
            Problem(f"regions={strategy.region_names}", str(error), "name modules that are there and can be regions")
        )
    problems += region_problems(regions.modules, module, strategy.topology, strategy.outputs)
    mixing = {
        ".".join(filter(None, (name, path))): layer
        for name, adapter in regions.adapters.items()
        for path, layer in adapter.mixing().items()
    }
    problems += [problem for name, adapter in regions.adapters.items() for problem in adapter.problems(name)]
    problems += _engine_problems(strategy, regions)
    problems += [mixing_problem(name, layer) for name, layer in mixing.items()]
    if strategy.fused_linear_cross_entropy and not any(adapter.fuses_loss for adapter in regions.adapters.values()):
        problems.append(
            Problem(
                "fused_linear_cross_entropy=True",
                f"no Hugging Face causal language model among the regions {list(regions.modules)}",
                "leave it out, and call lightning_dcp.loss.linear_cross_entropy in training_step with your hidden states",
            )
        )
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
    adapters = strategy.regions.adapters.items()
    problems = [problem for name, adapter in adapters for problem in adapter.problems_on_device(name, precision)]
    if attends_by_engine(strategy):
        found = te_ring_order_problem(strategy.steadiness.ring_order, scheme_in_force(strategy.attention))
        problems += [] if found is None else [found]
    raise_problems(problems + _attention_problems(strategy.regions, set(), strategy.attention, training, precision))


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
        adapter = regions.adapters[region]
        if not adapter.dry_runs:
            continue
        result = dry_run(module, options, adapter=adapter, training=training, forward_context=forward_context)
        if result.skipped is not None:
            rank_zero_info(
                f"Attention inside region {region or 'forward'!r} is checked at its first call, not at set-up: "
                f"{result.skipped}"
            )
        for finding in result.findings:
            name = ".".join(filter(None, (region, finding.layer)))
            if not lies_in(name, refused):
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


def describe_attention(strategy: DCPStrategy) -> str:
    """How attention is computed in the regions, in words."""
    theirs = _engine_regions(strategy.regions)
    all_theirs = bool(theirs) and len(theirs) == len(strategy.regions.adapters)
    parts = [] if all_theirs else [describe(strategy.attention)]
    if theirs:
        scheme = scheme_in_force(strategy.attention)
        parts.append(f"attention of {', '.join(theirs)} by {scheme}, in Transformer Engine's kernels")
    return "; ".join(parts)


def attends_by_engine(strategy: StrategyState) -> bool:
    """Whether any attention is Transformer Engine's, whose rings go in the order of the ranks."""
    return bool(_engine_regions(strategy.regions))


def _engine_regions(regions: Regions) -> list[str]:
    """The regions whose attention is Transformer Engine's."""
    adapters = regions.adapters.items()
    return [name or "forward" for name, a in adapters if has_transformer_engine_attention(a.module)]


def _engine_problems(strategy: DCPStrategy, regions: Regions) -> Iterable[Problem]:
    """Options of attention that would do nothing, since all of it is Transformer Engine's."""
    if not regions.adapters or len(_engine_regions(regions)) < len(regions.adapters):
        return
    settings = strategy.attention_settings
    for name, value in (("attention_kernel", settings.kernel), ("links", settings.links)):
        if value != "auto":
            found = (
                f"regions {_engine_regions(regions)} with Transformer Engine's attention, which has kernels of its own"
            )
            yield Problem(f"{name}={value!r}", found, f"leave {name} out, or use layer_spec(config, backend='local')")


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


def _backward_problems(module: LightningModule, trainer: Trainer, strategy: DCPStrategy) -> Iterable[Problem]:
    fitting = trainer.state.fn == TrainerFn.FITTING
    if fitting and strategy.topology.is_pipeline and is_overridden("backward", module):
        yield Problem(
            f"{type(module).__name__}.backward with pipeline_model_parallel_size={strategy.pipeline_model_parallel_size}",
            "Megatron-Core's schedules, which run the backward of each micro-batch themselves and would not call it",
            "remove it, or use pipeline_model_parallel_size=1",
        )


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
