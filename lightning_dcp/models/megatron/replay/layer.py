"""What a router asks instead of taking the experts with the highest scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_dcp.models.megatron.replay.calls import CallRoutes, Mode
from lightning_dcp.models.megatron.replay.routes import NO_ROUTE
from lightning_dcp.models.megatron.scope import Scope

if TYPE_CHECKING:
    from lightning_dcp.models.megatron.replay.model import ModelReplay

TopK = tuple[Tensor, Tensor]
"""Scores ``[n, topk]`` and experts, int64 ``[n, topk]``."""


class LayerReplay:
    """Stands in ``router.router_replay``, where Megatron-Core's ``topk_routing_with_score_function`` asks it.

    Megatron-Core's own object of this interface enters itself in a list of the process and pairs routes with routers by the
    order in which these were made. This one belongs to one router of one model.

    Args:
        model: the routes of the whole model.
        index: of this layer among those of the rank.
        scope: of the model.
    """

    def __init__(self, model: ModelReplay, index: int, scope: Scope) -> None:
        self.model, self.index, self.scope = model, index, scope

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., TopK] | None = None,
    ) -> TopK:
        """The experts of each token.

        Replayed experts get the scores that the router computes for them now, of all experts and not of the best alone, so
        that weights and gradients are those of the live router.

        Args:
            scores: of each expert, ``[n, experts]``: logits, or probabilities, as the config says.
            topk: experts a token.
            num_groups: of experts, for routing that is limited to some groups.
            group_topk: groups a token.
            default_compute_topk: what is called without replay.
        """
        if default_compute_topk is None:
            raise TypeError("default_compute_topk is needed: routes are recorded from it")
        live = default_compute_topk
        call = self.model.call(self.scope.current)
        if call.mode is Mode.REPLAY:
            return self._replayed(scores, call, lambda: live(scores.detach(), topk, num_groups, group_topk)[1])
        values, experts = live(scores, topk, num_groups, group_topk)
        if call.mode is Mode.RECORD:
            call.record(self.index, _highest_first(values.detach(), experts))
        return values, experts

    def _replayed(self, scores: Tensor, call: CallRoutes, live: Callable[[], Tensor]) -> TopK:
        given = call.routes(self.index, len(scores)).to(scores.device).long()
        routes = given.new_full((len(scores), *given.shape[1:]), NO_ROUTE)
        routes[call.places.to(scores.device)] = given
        if len(given) < len(routes) or not call.complete:
            routes = torch.where(routes < 0, live(), routes)
        return scores.gather(1, routes), routes

    def __deepcopy__(self, memo: Any) -> None:
        """A copied model is another model: its routers are not bound."""
        return None


def _highest_first(values: Tensor, experts: Tensor) -> Tensor:
    """Experts by falling score; without gradients ``topk`` need not sort, and weights are summed in this order."""
    return (
        experts if torch.is_grad_enabled() else experts.gather(1, values.argsort(dim=1, descending=True, stable=True))
    )
