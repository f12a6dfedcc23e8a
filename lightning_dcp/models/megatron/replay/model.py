"""The routes of one model on this rank: recorded, exchanged, given back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from lightning_dcp.batch.view import BatchView
from lightning_dcp.errors import RegionError
from lightning_dcp.models.megatron.replay.calls import CallRoutes, Mode, TokenPart
from lightning_dcp.models.megatron.replay.routes import NO_ROUTE, MoELayers, given_routes
from lightning_dcp.models.megatron.replay.store import RouteStore
from lightning_dcp.models.megatron.scope import PackScope

Exchange = Callable[[Any], list[Any]]
"""Gives what each rank gave; collective."""


@dataclass(frozen=True)
class _Piece:
    """What one rank recorded of one pack: ``routes [n, layers, topk]`` of the tokens at these positions of the pack."""

    samples: tuple[int, ...]
    positions: Tensor
    layers: tuple[int, ...]
    routes: Tensor


class ModelReplay:
    """Routes of one Megatron-Core model.

    Args:
        layers: its mixture-of-experts layers.
        store: recorded routes by sample.
        part: which part of a rank's tokens its routers see.
        speaks: whether this rank tells the others what it records: tensor-parallel ranks without sequence parallelism
            record the same.

    Attributes:
        mode: what calls do that begin now.
        view: the batch under way.
        field: the batch's field that routes come from; None: those that were recorded.
    """

    def __init__(self, layers: MoELayers, store: RouteStore, part: TokenPart, *, speaks: bool = True) -> None:
        self.layers, self.store, self.part, self.speaks = layers, store, part, speaks
        self.mode = Mode.LIVE
        self.view: BatchView | None = None
        self.field: str | None = None
        self._calls: WeakKeyDictionary[PackScope, CallRoutes] = WeakKeyDictionary()
        self._recorded: dict[tuple[int, ...], CallRoutes] = {}

    def begin(self, view: BatchView, mode: Mode, field: str | None) -> None:
        """A batch begins; what the one before has recorded and not kept is let go of."""
        self.view, self.mode, self.field = view, mode, field
        self._recorded.clear()

    def call(self, scope: PackScope | None) -> CallRoutes:
        """What the routers of a call do.

        Raises:
            RegionError: routes are to be recorded or replayed, and the call is not about samples of the batch.
            BatchError: there are no routes for them.
        """
        found = None if scope is None else self._calls.get(scope)
        if found is None:
            found = CallRoutes(self.mode, scope, self.part, self.layers.dtype)
            if scope is not None:
                self._calls[scope] = found
                self._fill(found, scope.context.device)
        return found

    def _fill(self, call: CallRoutes, device: torch.device) -> None:
        before = None if call.mode is Mode.LIVE else self._recorded.get(call.samples)
        if call.mode is Mode.RECORD:
            if before is not None:
                call.join(before)
            self._recorded[call.samples] = call
        elif call.mode is Mode.REPLAY:
            if self.field is None and before is not None:
                call.give_recorded(before)
            else:
                call.give(self._whole(call.samples), device)

    def _whole(self, samples: tuple[int, ...]) -> Tensor:
        """The routes of whole samples."""
        if self.view is None:
            raise RegionError("routes can be replayed while a batch is under way only")
        if self.field is not None:
            return given_routes(self.view, self.field, samples, self.layers)
        return self.store.packed(self.view, samples)

    def keep(self, exchange: Exchange) -> None:
        """Put what all ranks have recorded of the batch into the store. Collective.

        Raises:
            RegionError: a token of a recorded sample that no rank has routes of.
        """
        if self.view is None:
            raise RegionError("routes are kept at the end of a batch, and none is under way")
        pieces = [piece for rank in exchange(self._pieces()) for piece in rank]
        packs: dict[tuple[int, ...], Tensor] = {}
        for piece in pieces:
            shared = [number for number in self.layers.own if number in piece.layers]
            if not shared:
                continue
            if piece.samples not in packs:
                packs[piece.samples] = self._empty(self.view, piece.samples)
            columns = torch.tensor([self.layers.own.index(number) for number in shared])
            given = piece.routes[:, [piece.layers.index(number) for number in shared]]
            packs[piece.samples][piece.positions[:, None], columns] = given
        for samples, packed in packs.items():
            if bool((packed < 0).any()):
                raise RegionError(f"router replay recorded only a part of the tokens of samples {samples} of the batch")
            self.store.put(self.view, samples, packed)

    def _pieces(self) -> list[_Piece]:
        own = self.layers.own
        calls = self._recorded.values() if self.speaks and own else ()
        return [_Piece(c.samples, c.positions, own, c.recorded(range(len(own)))) for c in calls]

    def _empty(self, view: BatchView, samples: tuple[int, ...]) -> Tensor:
        tokens = sum(view.lengths[i] for i in samples)
        return torch.full((tokens, len(self.layers.own), self.layers.topk), NO_ROUTE, dtype=self.layers.dtype)

    def end(self) -> None:
        """The batch is over."""
        self.view, self.mode = None, Mode.LIVE
        self._recorded.clear()
