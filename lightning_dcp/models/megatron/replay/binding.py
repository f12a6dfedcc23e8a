"""Which routers of a model there are, whether their routes can be replayed, and how they get them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lightning_dcp.errors import Problem
from lightning_dcp.models.megatron.model import MegatronModel
from lightning_dcp.models.megatron.replay.calls import TokenPart
from lightning_dcp.models.megatron.replay.layer import LayerReplay
from lightning_dcp.models.megatron.replay.model import ModelReplay
from lightning_dcp.models.megatron.replay.routes import MoELayers
from lightning_dcp.models.megatron.replay.store import RouteStore
from lightning_dcp.models.megatron.router import context_parallel_router


def bind(model: MegatronModel, store: RouteStore | None = None) -> ModelReplay:
    """Give each router of a model its part of the model's routes; in place of what it had.

    Args:
        model: one that :func:`binding_problems` finds nothing against.
        store: routes that were recorded before; by default none.
    """
    from megatron.core import parallel_state

    routers, config = live_routers(model), model.config
    own = tuple(int(router.layer_number) for router in routers)
    layers = MoELayers(
        planned_layers(config), own, config.num_layers, config.num_moe_experts or 0, config.moe_router_topk
    )
    rank, size = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )
    part = TokenPart(rank, size) if config.sequence_parallel else TokenPart()
    kept = store if store is not None and store.samples else RouteStore(own)
    replay = ModelReplay(layers, kept, part, speaks=config.sequence_parallel or rank == 0)
    for index, router in enumerate(routers):
        router.router_replay = LayerReplay(replay, index, model.scope)
    return replay


def unbind(model: MegatronModel) -> None:
    """Make the routers choose by themselves."""
    for router in live_routers(model):
        if isinstance(router.router_replay, LayerReplay):
            router.router_replay = None


def has_experts(model: MegatronModel) -> bool:
    """Whether a model has mixture-of-experts layers, on this stage or another."""
    return bool(model.config.num_moe_experts)


def binding_problems(model: MegatronModel, name: str, store: RouteStore | None = None) -> Iterator[Problem]:
    """What stands against replaying the routes of a model.

    Args:
        model: a model with experts.
        name: of the model, for the problems.
        store: routes that are to be replayed.
    """
    config, asked = model.config, f"router replay in model {name!r}"
    if config.moe_router_fusion:
        yield Problem(
            asked, "moe_router_fusion=True: a fused kernel chooses experts and takes none", "moe_router_fusion=False"
        )
    if getattr(config, "moe_enable_routing_replay", False):
        yield Problem(
            asked,
            "moe_enable_routing_replay=True: Megatron-Core's own replay, which would ask for the same routers",
            "leave moe_enable_routing_replay out",
        )
    yield from _layer_problems(model, asked, store)


def _layer_problems(model: MegatronModel, asked: str, store: RouteStore | None) -> Iterator[Problem]:
    layers, routers, planned = moe_layers(model), live_routers(model), planned_layers(model.config)
    if len(layers) != len(routers):
        yield Problem(
            asked,
            f"{len(layers)} mixture-of-experts layers on this rank, {len(routers)} of them with a router that knows packs",
            "make the layers from lightning_dcp.models.megatron.layer_spec(config)",
        )
    numbers = tuple(int(layer.layer_number) for layer in layers)
    expected = [number for number in planned if number in own_layers(model)]
    if list(numbers) != expected:
        yield Problem(
            asked,
            f"{len(numbers)} mixture-of-experts layers on this rank (numbers {list(numbers)}) where moe_layer_freq="
            f"{model.config.moe_layer_freq!r} makes {len(expected)} ({expected})",
            "set moe_layer_freq to what the layer spec makes",
        )
    if store is not None and store.samples and store.layers != numbers:
        yield Problem(
            asked,
            f"routes recorded of layers {list(store.layers)}, and layers {list(numbers)} on this rank",
            "record and replay with the same pipeline stages, or clear() the routes",
        )


def moe_layers(model: MegatronModel) -> list[Any]:
    """The mixture-of-experts layers on this rank, in order."""
    from megatron.core.transformer.moe.moe_layer import BaseMoELayer

    return [layer for layer in model.modules() if isinstance(layer, BaseMoELayer)]


def live_routers(model: MegatronModel) -> list[Any]:
    """Those routers of these layers that know the pack of a call."""
    kind = context_parallel_router()
    return [layer.router for layer in moe_layers(model) if isinstance(layer.router, kind)]


def own_layers(model: MegatronModel) -> set[int]:
    """Numbers of all layers on this rank, from 1."""
    chunks: list[Any] = list(model.chunks)
    return {int(layer.layer_number) for chunk in chunks for layer in chunk.decoder.layers}


def planned_layers(config: Any) -> tuple[int, ...]:
    """Numbers of a config's mixture-of-experts layers, from 1, as Megatron-Core reads ``moe_layer_freq``."""
    if not config.num_moe_experts:
        return ()
    frequency = config.moe_layer_freq
    if isinstance(frequency, int):
        return tuple(number for number in range(1, config.num_layers + 1) if (number - 1) % frequency == 0)
    return tuple(number for number, with_experts in enumerate(frequency, 1) if with_experts)
