"""Routes of whole samples: which experts each token goes to in each mixture-of-experts layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_dcp.batch.view import BatchView
from lightning_dcp.errors import BatchError
from lightning_dcp.models.megatron.replay.store import field_of

NO_ROUTE = -1
"""An entry of a token that has no route: it goes where the router sends it."""


@dataclass(frozen=True)
class MoELayers:
    """The mixture-of-experts layers of a model, and those of them that lie on this rank.

    Attributes:
        every: numbers of the model's mixture-of-experts layers, from 1, over all pipeline stages.
        own: those on this rank, in the order of the layers.
        num_layers: layers of the model, those without experts too.
        experts: experts of each.
        topk: experts that a token goes to.
    """

    every: tuple[int, ...]
    own: tuple[int, ...]
    num_layers: int
    experts: int
    topk: int

    @property
    def dtype(self) -> torch.dtype:
        """What numbers of experts are stored in: one byte up to 128 experts, two beyond."""
        return torch.int8 if self.experts <= 128 else torch.int16

    def columns(self, layers: int) -> list[int] | None:
        """Where this rank's layers lie among so many: the mixture-of-experts layers, or all; None for another number."""
        if layers == len(self.every):
            return [self.every.index(number) for number in self.own]
        return [number - 1 for number in self.own] if layers == self.num_layers else None


def given_routes(view: BatchView, field: str, samples: Sequence[int], layers: MoELayers) -> Tensor:
    """The routes of some samples out of a field of the batch.

    Args:
        view: the batch.
        field: its field: integers, per-token, ``[.., layers, topk]`` behind the axes of ``input_ids``, as vLLM and SGLang
            return them. ``layers`` are the mixture-of-experts layers, or all layers of the model. -1 in a token's row: no
            route, as for the last token of a completion, which the rollout engine never computed.
        samples: indices into the batch.
        layers: of the model.

    Returns:
        ``[T, own layers, topk]`` where the batch lies, T tokens of these samples one after another.

    Raises:
        BatchError: no such field, another shape or dtype, an expert that is not there, or one twice for a token.
    """
    part = view.part(samples)
    value = field_of(part, field)
    if not isinstance(value, Tensor) or value.is_floating_point() or not part.per_token(value):
        found = f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise BatchError(
            f"router replay wants the batch's field {field!r}: integers, {part.shape_name[:-4]}layers, {layers.topk}]; found "
            f"{found}. Have the rollout engine return its routes, and collate them as input_ids."
        )
    routes = part.flatten(value)
    columns = layers.columns(routes.shape[1]) if routes.dim() == 3 else None
    if columns is None or routes.shape[2] != layers.topk:
        raise BatchError(
            f"field {field!r} has {list(routes.shape[1:])} entries a token; the model has {len(layers.every)} "
            f"mixture-of-experts layers among {layers.num_layers} layers, and moe_router_topk={layers.topk}: "
            f"[{len(layers.every)}, {layers.topk}] or [{layers.num_layers}, {layers.topk}] are understood"
        )
    own = routes[:, columns]
    _check(own, field, [part.sample_ids[i] for i, n in enumerate(part.lengths) for _ in range(n)], layers)
    return own.to(layers.dtype)


def _check(routes: Tensor, field: str, sample_of: Sequence[int], layers: MoELayers) -> None:
    """Refuse what would send a token to no expert, or to fewer than the dispatcher counts on."""
    wide = routes.short() if routes.element_size() == 1 else routes  # -1 and experts beyond 127 in one dtype
    outside = (wide < NO_ROUTE) | (wide >= layers.experts)
    ordered = wide.sort(dim=-1).values
    twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] != NO_ROUTE)
    partly = (wide == NO_ROUTE).any(-1) & (wide != NO_ROUTE).any(-1)
    wrong = outside.any(-1) | twice.any(-1) | partly
    if bool(wrong.any()):
        token, layer = wrong.nonzero()[0].tolist()
        raise BatchError(
            f"field {field!r} sends a token of sample {sample_of[token]} to experts {wide[token, layer].tolist()} in layer "
            f"{layers.own[layer]}: they must be {layers.topk} different ones of 0..{layers.experts - 1}, or all {NO_ROUTE}"
        )
