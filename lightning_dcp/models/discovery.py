"""Which modules of a LightningModule are its regions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn

from lightning_dcp.errors import RegionError
from lightning_dcp.models.adapter import ModelAdapter
from lightning_dcp.models.compiled import COMPILED_CHILD, refuse_inside_compiled, uncompiled
from lightning_dcp.models.huggingface import is_transformer, transformer_adapter, transformer_region
from lightning_dcp.models.megatron import MegatronAdapter, MegatronModel
from lightning_dcp.models.megatron.model import megatron_models
from lightning_dcp.models.positions import POSITIONS, positions_argument
from lightning_dcp.models.region import Regions


def find_regions(
    root: nn.Module,
    names: list[str] | None,
    *,
    forward_overridden: bool,
    fused_linear_cross_entropy: bool = False,
) -> Regions:
    """The regions of a LightningModule: those named, or those that are plain to see.

    Without names these are, in this order: the module's own ``forward`` if that takes positions and there is no Hugging Face
    or Megatron-Core model in it; or else every such model in it (policy and reference, teacher and student; for one whose
    head mixes tokens, such as a sequence classifier, the model below the head), and the one child whose forward takes
    positions, if there is just one.

    Names may be of the models themselves, or of a wrapper of just one (PEFT's, for example): then it is the model inside.

    Args:
        root: the LightningModule.
        names: attribute paths, such as ``["policy", "reference"]``; ``""`` is the module itself.
        forward_overridden: whether the module defines ``forward``.
        fused_linear_cross_entropy: whether losses of Hugging Face models are computed without logits.

    Raises:
        RegionError: nothing or too much found (the candidates are listed), a name that is none, or a region inside a
            compiled module.
    """
    modules = _find(root, names, forward_overridden)
    for name in modules:
        refuse_inside_compiled(root, name)

    def adapt(module: nn.Module) -> ModelAdapter:
        if is_transformer(uncompiled(module)):
            return transformer_adapter(module, fused=fused_linear_cross_entropy)
        if isinstance(uncompiled(module), MegatronModel):
            return MegatronAdapter(module)
        return ModelAdapter(module)

    # Lightning's from_compiled: trainer.fit(torch.compile(module)) compiles the steps and forward of the module
    compiler = getattr(root, "_compiler_ctx", None)
    return Regions(modules, compiler["dynamo_ctx"] if compiler else None, adapt)


def _find(root: nn.Module, names: list[str] | None, forward_overridden: bool) -> dict[str, nn.Module]:
    if names is not None:
        return dict(_named(root, name) for name in names)
    transformers = dict(_transformers(root)) | megatron_models(root)
    if forward_overridden and not transformers and positions_argument(root) is not None:
        return {"": root}
    candidates = {name: child for name, child in root.named_children() if any(True for _ in child.parameters())}
    plain = {name: child for name, child in candidates.items() if not _holds(name, transformers)}
    eligible = {name: child for name, child in plain.items() if positions_argument(child) is not None}
    if len(eligible) == 1 or (transformers and not eligible):
        return transformers | eligible
    raise RegionError(_not_found(type(root).__name__, {**transformers, **plain}, [*transformers, *eligible]))


def _transformers(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The outermost Hugging Face models, each as far as it can be a region; a compiled one with its wrapper."""
    found: list[str] = []
    for name, module in root.named_modules():
        if name and is_transformer(uncompiled(module)) and not any(_inside(name, outer) for outer in found):
            found.append(name)
            path, region = transformer_region(name, module)
            yield path, region


def _inside(name: str, outer: str) -> bool:
    return name.startswith(f"{outer}.") or name == f"{outer}.{COMPILED_CHILD}"


def _holds(child: str, names: Mapping[str, nn.Module]) -> bool:
    return any(name == child or name.startswith(f"{child}.") for name in names)


def _named(root: nn.Module, name: str) -> tuple[str, nn.Module]:
    """The region that a name stands for, with its own path."""
    try:
        module = root.get_submodule(name)
    except AttributeError as error:
        paths = [path for path, _ in root.named_modules() if path.count(".") < 2]
        raise RegionError(f"regions: {type(root).__name__} has no module {name!r}; it has {paths}") from error
    if is_transformer(uncompiled(module)):
        return transformer_region(name, module)
    around = [
        path
        for path, outer in root.named_modules()
        if path and _inside(name, path) and is_transformer(uncompiled(outer))
    ]
    if around:
        raise RegionError(
            f"region {name!r} is a part of the Hugging Face model {around[0]!r}, which makes masks and positions for it: name "
            f"{around[0]!r} itself"
        )
    inside = list(_transformers(module)) if positions_argument(module) is None else []
    if len(inside) == 1:
        path, model = inside[0]
        return f"{name}.{path}" if name else path, model
    return name, module


def _not_found(root: str, candidates: Mapping[str, nn.Module], eligible: list[str]) -> str:
    listed = "; ".join(
        f"{name!r} ({type(uncompiled(child)).__name__}, {'can be one' if name in eligible else 'forward takes no positions'})"
        for name, child in candidates.items()
    )
    problem = "more than one module could be the context-parallel region" if eligible else "no context-parallel region"
    return (
        f"{problem} of {root}. Candidates: {listed or 'none (no child module has parameters)'}. Name it: "
        f"DCPStrategy(regions=[...]); its forward must take {POSITIONS}=None, the position of each token ([1, T])."
    )
