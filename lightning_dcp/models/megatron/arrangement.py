"""Whether Megatron-Core's models lie in a LightningModule as they must: wrapped, not compiled, in a pipeline alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn

from lightning_dcp.errors import Problem
from lightning_dcp.models.compiled import is_compiled
from lightning_dcp.models.megatron import compat
from lightning_dcp.models.megatron.model import MegatronModel, megatron_models
from lightning_dcp.parallel.topology import Topology

_WRAP = (
    "make it in configure_model by MegatronModel(provider), with lightning_dcp.models.megatron.layer_spec and "
    "model_parallel_fields; or use MegatronGPT"
)
_ALONE = "one model, whose micro-batches the stages hand on: each stage runs only its own part"


def arrangement_problems(root: nn.Module, topology: Topology) -> Iterator[Problem]:
    """What is wrong with where Megatron-Core's modules are.

    Args:
        root: the LightningModule.
        topology: the sizes in force.
    """
    models = megatron_models(root)
    if topology.is_model_parallel and not models:
        found = f"no MegatronModel in {type(root).__name__}, and so no weights that could be shared out"
        yield Problem(
            _sizes(topology), found, "use MegatronGPT, or a GPTModel in MegatronModel; or leave the sizes at 1"
        )
    for name, model in models.items():
        own = bool(model.config.sequence_parallel)
        if own != topology.sequence_parallel:
            found = f"sequence_parallel={topology.sequence_parallel} in the strategy"
            remedy = (
                "spread model_parallel_fields(self.trainer.strategy) into the config, and ask for it in DCPStrategy"
            )
            yield Problem(f"sequence_parallel={own} in the config of {name!r}", found, remedy)
    yield from _bare(root)
    yield from compiled_problems(root)


def region_problems(
    regions: Mapping[str, nn.Module], root: nn.Module, topology: Topology, outputs: str
) -> Iterator[Problem]:
    """What is wrong with Megatron-Core models as regions, or beside them.

    Args:
        regions: their modules, by name.
        root: the LightningModule.
        topology: the sizes in force.
        outputs: what steps see.
    """
    for name, model in megatron_models(root).items():
        if not any(region is model for region in regions.values()):
            found = (
                f"a MegatronModel {name!r} beside the regions {list(regions)}, which would see packs without borders"
            )
            yield Problem(f"regions={list(regions)}", found, "name it, too, or leave regions out")
        if model.config.num_moe_experts and outputs != "gathered":
            found = f"experts in {name!r}, whose counts and auxiliary losses a trial of shards would add up three times"
            yield Problem(f"outputs={outputs!r}", found, 'use outputs="gathered"')
    others = [name or "forward" for name, module in regions.items() if not isinstance(module, MegatronModel)]
    models = [name for name, module in regions.items() if isinstance(module, MegatronModel)]
    if topology.is_pipeline and models and len(regions) > 1:
        asked = f"regions {models + others} with pipeline_model_parallel_size={topology.pipeline_model_parallel_size}"
        remedy = "use pipeline_model_parallel_size=1 (tensor parallelism splits several models), or one model"
        yield Problem(asked, _ALONE, remedy)


def compiled_problems(root: nn.Module) -> Iterator[Problem]:
    """Megatron-Core models with ``torch.compile`` around them or inside: compiled code does not see the pack change."""
    modules = dict(root.named_modules())
    models = list(megatron_models(root))
    if models and getattr(root, "_compiler_ctx", None):
        yield _compiled(type(root).__name__, models[0])
    for name, layer in modules.items():
        near = next((m for m in models if _holds(name, m) or _holds(m, name)), None)
        if near is not None and is_compiled(layer):
            yield _compiled(name or type(root).__name__, near)


def _compiled(name: str, model: str) -> Problem:
    found = f"compiled code at the MegatronModel {model!r}, whose layers ask for the pack of each call"
    return Problem(
        f"torch.compile of {name!r}", found, "leave torch.compile out; Megatron-Core compiles its functions itself"
    )


def _bare(root: nn.Module) -> Iterator[Problem]:
    """Modules of Megatron-Core that attend, outside any MegatronModel; the outermost ones."""
    kinds, found = compat.attending(), list[str]()
    for name, layer in root.named_modules():
        if any(_holds(outer, name) for outer in found):
            continue
        if isinstance(layer, MegatronModel):
            found.append(name)
        elif isinstance(layer, kinds):
            found.append(name)
            what = "a module of Megatron-Core whose attention and positions know nothing of packs"
            yield Problem(f"{type(layer).__name__} {name!r} outside a MegatronModel", what, _WRAP)


def _holds(outer: str, name: str) -> bool:
    return not outer or name == outer or name.startswith(f"{outer}.")


def _sizes(topology: Topology) -> str:
    sizes = {
        "tensor_model_parallel_size": topology.tensor_model_parallel_size,
        "pipeline_model_parallel_size": topology.pipeline_model_parallel_size,
        "expert_model_parallel_size": topology.expert_model_parallel_size,
        "expert_tensor_parallel_size": topology.expert_tensor_ranks,
    }
    return ", ".join(f"{name}={size}" for name, size in sizes.items() if size > 1)
