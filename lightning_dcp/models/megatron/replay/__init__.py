"""Router replay: the experts that tokens went to once are chosen for them again. Nothing here imports megatron at once."""

from lightning_dcp.models.megatron.replay.binding import bind, binding_problems, has_experts, unbind
from lightning_dcp.models.megatron.replay.calls import Mode, TokenPart
from lightning_dcp.models.megatron.replay.layer import LayerReplay
from lightning_dcp.models.megatron.replay.model import Exchange, ModelReplay
from lightning_dcp.models.megatron.replay.routes import MoELayers, given_routes
from lightning_dcp.models.megatron.replay.store import RouteStore

__all__ = [
    "Exchange",
    "LayerReplay",
    "MoELayers",
    "Mode",
    "ModelReplay",
    "RouteStore",
    "TokenPart",
    "bind",
    "binding_problems",
    "given_routes",
    "has_experts",
    "unbind",
]
