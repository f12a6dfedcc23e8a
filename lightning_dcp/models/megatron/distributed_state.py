"""The distributed optimizer's state for checkpoints: put together as torch's AdamW has it, and dealt out again.

So a checkpoint does not depend on who held which share: it is continued on any number of ranks, with the distributed optimizer
or without.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_dcp.models.megatron.checkpoint.optimizers import MASTER
from lightning_dcp.models.megatron.checkpoint.weights import parameters_of
from lightning_dcp.models.megatron.distributed_optimizer import DistributedOptimizer
from lightning_dcp.models.megatron.gradients import is_expert

_MOMENTS = ("exp_avg", "exp_avg_sq")


class WholeState:
    """In place of the user's optimizer where states are saved and loaded: with those of the weights that are dealt out.

    Args:
        own: the distributed optimizer.

    Attributes:
        param_groups: the user's.
        state: by weight, as AdamW's, ``master`` besides for weights in bfloat16; filled by :meth:`gather`.
        keeps_master: True; optimizers of torch's know no ``master``, and get none from a checkpoint.
    """

    keeps_master = True

    def __init__(self, own: DistributedOptimizer) -> None:
        self._own = own
        self.param_groups: list[dict[str, Any]] = own.settings.param_groups
        self.state: dict[Tensor, dict[str, Any]] = dict(own.settings.state)

    def state_dict(self) -> dict[str, Any]:
        """As the user's optimizer's."""
        return self._own.settings.state_dict()

    @torch.no_grad()
    def gather(self) -> None:
        """Put the states together, on the CPU. Collective over the plane.

        A rank keeps those of the weights that it speaks of in a checkpoint, so that the ranks of a node do not each hold all.
        """
        own = self._own
        if not own.steps:
            return
        shares, spoken = {id(weight): (share, part) for weight, share, part in own.shards()}, self._spoken()
        for weight in self._held():
            keys = _MOMENTS if weight.dtype == torch.float32 else (*_MOMENTS, MASTER)
            pieces, span = _pieces(weight, *shares[id(weight)]) if id(weight) in shares else ({}, slice(0))
            for key in keys:
                whole = self._whole(weight, pieces.get(key), span)
                if id(weight) in spoken:
                    self.state.setdefault(weight, {"step": torch.tensor(float(own.steps))})[key] = whole.cpu()

    def _spoken(self) -> set[int]:
        """The ``id`` of each weight whose state this rank writes."""
        from megatron.core.dist_checkpointing.mapping import is_main_replica

        every = (entry for model in self._own.models for entry in parameters_of(model, ""))
        return {id(weight) for weight, entry in every if is_main_replica(entry.sharded.replica_id)}

    def _held(self) -> list[nn.Parameter]:
        every = (p for group in self.param_groups for p in group["params"])
        return [p for p in every if self._own.holds(p) and p.requires_grad]

    def _whole(self, weight: nn.Parameter, piece: Tensor | None, span: slice) -> Tensor:
        whole = torch.zeros(weight.numel(), dtype=torch.float32, device=weight.device)
        if piece is not None:
            whole[span] = piece
        groups = self._own.groups
        dist.all_reduce(whole, group=groups.expert_data if is_expert(weight) else groups.plane)
        return whole.view(weight.shape)

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Deal out states; those of other weights, and all settings, go to the user's optimizer.

        Args:
            state: as of :meth:`torch.optim.Optimizer.state_dict`: ``state`` by a weight's place among all, ``param_groups``.
        """
        own = self._own
        numbers = [p for group in self.param_groups for p in group["params"]]
        held = {id(p): state["state"][n] for n, p in enumerate(numbers) if own.holds(p) and n in state["state"]}
        outside = {n: s for n, s in state["state"].items() if not own.holds(numbers[n])}
        own.settings.load_state_dict({"state": outside, "param_groups": state["param_groups"]})
        weights = {id(share): (weight, part) for weight, share, part in own.shards()}
        for part in own.parts:
            shares = [share for group in part.optimizer.param_groups for share in group["params"]]
            dealt = {}
            for number, share in enumerate(shares):
                weight, _ = weights[id(share)]
                if id(weight) in held:
                    dealt[number] = _share_of(held[id(weight)], weight, share, _span(part, weight))
            groups = part.optimizer.state_dict()["param_groups"]
            part.optimizer.load_state_dict({"state": dealt, "param_groups": groups})
        own.steps = max((int(saved["step"]) for saved in held.values()), default=0)


def _span(part: Any, weight: nn.Parameter) -> slice:
    """Where this rank's share lies in the flat weight."""
    found = part._get_model_param_range_map(weight)["param"]
    return slice(found.start, found.end)


def _pieces(weight: nn.Parameter, share: Tensor, part: Any) -> tuple[dict[str, Tensor], slice]:
    """This rank's share of a weight's state, and where it lies."""
    state = part.optimizer.state[share]
    return {MASTER: share} | {key: state[key] for key in _MOMENTS}, _span(part, weight)


def _share_of(saved: Mapping[str, Any], weight: nn.Parameter, share: Tensor, span: slice) -> dict[str, Any]:
    pieces = {key: saved[key].flatten()[span].to(share.device) for key in _MOMENTS}
    if MASTER in saved and weight.dtype != torch.float32:  # else the share is a view of the weight itself
        share.copy_(saved[MASTER].flatten()[span])
    return pieces | {"step": saved["step"]}
