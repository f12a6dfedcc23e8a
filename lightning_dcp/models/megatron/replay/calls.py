"""The routes of one call of a model on one pack."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from lightning_dcp.errors import RegionError
from lightning_dcp.models.megatron.scope import PackScope
from lightning_dcp.parallel.context import CPContext


class Mode(Enum):
    """What routers do: choose, choose and remember, or take what is given."""

    LIVE = "live"
    RECORD = "record"
    REPLAY = "replay"


@dataclass(frozen=True)
class TokenPart:
    """Which part of a rank's tokens its routers see.

    Attributes:
        index: of this rank in its tensor-parallel group with sequence parallelism; else 0.
        parts: ranks that the tokens are dealt out to; without sequence parallelism 1.
    """

    index: int = 0
    parts: int = 1

    def rows(self, context: CPContext) -> int:
        """Tokens that a router sees, fill tokens too."""
        return context.num_region_tokens // self.parts

    def places(self, context: CPContext) -> tuple[Tensor, Tensor]:
        """Which of these are tokens of samples, and where they lie in the pack: int64 ``[n]`` each, on the CPU."""
        rows = self.rows(context)
        index, first = context.region_index.cpu(), self.index * rows
        here = (index >= first) & (index < first + rows)
        return index[here] - first, context.layout.pack_index(context.rank)[here]


class CallRoutes:
    """What the routers of one call do, settled when its first router runs.

    Layers that are computed again in the backward do the same, whatever the mode is by then.

    Attributes:
        mode: what they do.
        samples: of the batch, that the call is about.
        places: of the samples' tokens among those that a router sees; the others are fill tokens and padding.
        positions: of the samples' tokens in the pack.
        complete: whether each of these has a route.
    """

    def __init__(
        self,
        mode: Mode,
        scope: PackScope | None = None,
        part: TokenPart | None = None,
        dtype: torch.dtype = torch.int16,
    ) -> None:
        self.mode = mode
        self.complete = True
        self._routes: dict[int, Tensor] = {}
        self._dtype = dtype
        if mode is Mode.LIVE:
            return
        if scope is None or scope.samples is None or part is None:
            asked = "outside a step" if scope is None else "of other sequences than the batch's samples"
            raise RegionError(
                f"router {mode.value} in a call {asked}: routes belong to whole samples of the batch. Call the model with these, "
                "or inside `with replay.live():`"
            )
        self.samples = scope.samples
        self.places, self.positions = part.places(scope.context)
        self._rows = part.rows(scope.context)

    def record(self, layer: int, experts: Tensor) -> None:
        """Keep the experts ``[n, topk]`` of a layer; those of fill tokens are left out."""
        self._check_rows(len(experts))
        self._routes[layer] = experts[self.places.to(experts.device)].detach().to(self._dtype)

    def give(self, packed: Tensor, device: torch.device) -> None:
        """Take the call's part of whole routes ``[T, layers, topk]``, wherever they lie."""
        own = packed[self.positions.to(packed.device)]
        self.complete = not bool((own < 0).any())
        self._routes = dict(enumerate(own.to(device).unbind(1)))

    def give_recorded(self, before: CallRoutes) -> None:
        """Take what an earlier call recorded, on the same tokens.

        Raises:
            RegionError: it was about other tokens of these samples.
        """
        if not torch.equal(self.positions, before.positions):
            raise RegionError("routes recorded in this step are of other tokens of the same samples")
        self._routes = dict(before._routes)  # what is recorded later belongs to calls that begin later

    def join(self, before: CallRoutes) -> None:
        """Start from what another call has recorded of the same tokens: a virtual pipeline calls chunk after chunk.

        What that call has recorded stays as it is, and what it records again, in its backward, is not this one's.
        """
        if torch.equal(self.positions, before.positions):
            self._routes = dict(before._routes)

    def routes(self, layer: int, rows: int) -> Tensor:
        """The experts ``[n, topk]`` of a layer, those of the tokens at :attr:`places`.

        Args:
            layer: index among the rank's mixture-of-experts layers.
            rows: tokens that its router sees.

        Raises:
            RegionError: another number of tokens than the call has, or a layer that was not recorded.
        """
        self._check_rows(rows)
        if layer not in self._routes:
            raise RegionError("the recorded call ended before all its layers had run; record a whole call")
        return self._routes[layer]

    def recorded(self, layers: Sequence[int]) -> Tensor:
        """The experts of all these layers, ``[n, layers, topk]``, on the CPU."""
        return torch.stack([self.routes(layer, self._rows) for layer in layers], dim=1).cpu()

    def _check_rows(self, rows: int) -> None:
        if rows != self._rows:
            raise RegionError(
                f"a router sees {rows} tokens where its pack has {self._rows} on this rank; router replay follows tokens through "
                "Megatron-Core's own layers only"
            )
