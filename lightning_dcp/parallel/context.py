"""Everything that context-parallel code needs to know of one pack, as one value that is passed on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from lightning_dcp.errors import PlanError
from lightning_dcp.parallel.blocks import AttentionBlocks, AttentionMask, attention_blocks
from lightning_dcp.parallel.clock import WaitClock
from lightning_dcp.parallel.exchange import Exchange, GroupExchange
from lightning_dcp.parallel.groups import CPGroup
from lightning_dcp.parallel.layout import PackLayout, build_layout
from lightning_dcp.parallel.ring_order import from_place_0
from lightning_dcp.schedule.alignment import NO_ALIGNMENT, Alignment


@dataclass(frozen=True, eq=False)
class CPContext:
    """One pack on one CP group, seen from one rank. An argument, never a global.

    Activation recomputation and pipeline schedules run a pack's backward after another pack's forward; whoever holds
    the right context computes the right thing.

    Attributes:
        group: the CP group.
        rank: this rank's place in it.
        layout: which tokens each rank of the group holds.
        device: where the pack's tensors lie.
        exchange: communication inside the group.
        token_multiple: a region's module sees a multiple of so many tokens: sequence parallelism deals them out.
        alignment: the padding that samples get for a region's module.
        padded: the layout of samples with their padding, of which ``layout`` is the part without; None where nothing is
            padded.
    """

    group: CPGroup
    rank: int
    layout: PackLayout
    device: torch.device
    exchange: Exchange
    token_multiple: int = 1
    alignment: Alignment = NO_ALIGNMENT
    padded: PackLayout | None = None

    @property
    def size(self) -> int:
        """Ranks of the group, c."""
        return self.group.size

    @property
    def ring(self) -> tuple[int, ...]:
        """The group's places in the order in which hops visit them: 0, 1, ..., c - 1 unless asked otherwise."""
        return self.exchange.ring

    def holder(self, hop: int) -> int:
        """Whose share this rank has after so many hops: its own after none and after c."""
        ring = self.ring
        return ring[(ring.index(self.rank) - hop) % self.size]

    @cached_property
    def num_local_tokens(self) -> int:
        """Tokens of the pack that this rank holds."""
        return self.layout.tokens(self.rank)

    @cached_property
    def pack_index(self) -> Tensor:
        """Where the local tokens lie in the pack, int64 ``[num_local_tokens]``, on the pack's device."""
        return self.layout.pack_index(self.rank).to(self.device)

    @cached_property
    def gather_index(self) -> Tensor:
        """Where the tokens of all ranks, one rank after another, lie in the pack; int64 ``[T]``."""
        return torch.cat([self.layout.pack_index(rank) for rank in range(self.size)]).to(self.device)

    @cached_property
    def positions(self) -> Tensor:
        """Position of each local token in its own sample, int64 ``[1, num_local_tokens]``: RoPE's position ids."""
        return self.layout.positions(self.rank).unsqueeze(0).to(self.device)

    @property
    def num_fill_tokens(self) -> int:
        """Tokens that a region adds to those of this rank: behind samples as their padding, and behind all of them."""
        return self.num_region_tokens - self.num_local_tokens

    @property
    def num_region_tokens(self) -> int:
        """Tokens that a region's module sees on this rank."""
        return self.region_tokens[self.rank]

    @cached_property
    def region_tokens(self) -> list[int]:
        """Tokens that a region's module sees on each rank of the group."""
        return _region_tokens(self.padded or self.layout, self.token_multiple, self.alignment)

    @cached_property
    def region_index(self) -> Tensor:
        """Where the tokens of this rank lie among those that a region's module sees, int64 ``[num_local_tokens]``."""
        if self.padded is None:
            return torch.arange(self.num_local_tokens, device=self.device)
        return self.padded.places_without_padding(self.rank, self.layout.lengths).to(self.device)

    @cached_property
    def is_real(self) -> Tensor:
        """Which of the tokens that a region's module sees are tokens of samples, bool ``[num_region_tokens]``."""
        real = torch.zeros(self.num_region_tokens, dtype=torch.bool, device=self.device)
        return real.index_fill(0, self.region_index, True)

    def with_fill(self, local: Tensor, fill: Tensor | float = 0) -> Tensor:
        """Values of this rank's tokens, among those of the tokens that a region adds.

        Args:
            local: ``[num_local_tokens, ...]``.
            fill: one value for all others, ``[...]`` or a number.

        Returns:
            ``[num_region_tokens, ...]``; a gradient reaches ``local`` alone.
        """
        if not self.num_fill_tokens:
            return local
        value = torch.as_tensor(fill, dtype=local.dtype, device=local.device).detach()
        if self.padded is None:
            return torch.cat([local, value.expand(self.num_fill_tokens, *local.shape[1:])])
        return value.expand(self.num_region_tokens, *local.shape[1:]).index_copy(0, self.region_index, local)

    def without_fill(self, values: Tensor) -> Tensor:
        """The inverse of :meth:`with_fill`: ``[num_region_tokens, ...]`` to ``[num_local_tokens, ...]``."""
        if not self.num_fill_tokens:
            return values
        if self.padded is None:
            return values[: self.num_local_tokens]
        return values.index_select(0, self.region_index)

    @cached_property
    def with_padding(self) -> CPContext:
        """The same pack with the padding of samples as tokens of these: for back ends that need their lengths so."""
        if self.padded is None:
            return self
        return replace(self, layout=self.padded, padded=None)

    @cached_property
    def tokens(self) -> list[int]:
        """Tokens of the pack that each rank of the group holds."""
        return [self.layout.tokens(rank) for rank in range(self.size)]

    @cached_property
    def _blocks(self) -> dict[tuple[int | None, int | None, AttentionMask], tuple[AttentionBlocks, ...]]:
        return {}

    def blocks(self, q_rank: int | None, k_rank: int | None, mask: AttentionMask) -> tuple[AttentionBlocks, ...]:
        """The attention blocks from one rank's queries to another's keys (None: the whole pack's); made once a pack."""
        key = q_rank, k_rank, mask
        if key not in self._blocks:
            self._blocks[key] = attention_blocks(self.layout, q_rank, k_rank, mask, self.device)
        return self._blocks[key]


def fill_tokens(tokens: int, size: int, multiple: int = 1) -> int:
    """Tokens that a region puts behind those of a rank of a group of this size, so that there are two at least.

    Models take one token for a step of generation and attend otherwise then, and some cannot take none; but what is
    computed must not depend on how a sample is cut.

    Args:
        tokens: of the rank.
        size: ranks of the group.
        multiple: with those behind them there are a multiple of so many.
    """
    least = max(tokens, 2) if size > 1 else tokens
    return -(-least // multiple) * multiple - tokens


def region_tokens(
    name: str, lengths: Sequence[int], size: int, *, token_multiple: int = 1, alignment: Alignment = NO_ALIGNMENT
) -> list[int]:
    """Tokens that a region's module sees on each rank: those of the pack, their padding, and what lies behind them.

    Args:
        name: of the layout.
        lengths: tokens of each sample of the pack.
        size: ranks of the group.
        token_multiple: there are a multiple of so many on each rank.
        alignment: the padding that samples get.
    """
    return _region_tokens(layout_of(name, alignment.padded_lengths(lengths, size), size), token_multiple, alignment)


def _region_tokens(padded: PackLayout, token_multiple: int, alignment: Alignment) -> list[int]:
    multiple = math.lcm(token_multiple, alignment.rank)  # layouts of a user's own may deal a pack out unevenly
    held = [padded.tokens(rank) for rank in range(padded.size)]
    return [tokens + fill_tokens(tokens, padded.size, multiple) for tokens in held]


@lru_cache(maxsize=256)
def layout_of(name: str, lengths: tuple[int, ...], size: int) -> PackLayout:
    """The layout of a pack by its name; those made last are kept, as a batch is asked about more than once."""
    return build_layout(name, lengths, size)


def make_context(
    group: CPGroup,
    rank: int,
    lengths: Sequence[int],
    *,
    layout: str | PackLayout = "zigzag",
    device: torch.device | str = "cpu",
    clock: WaitClock | None = None,
    exchange: Exchange | None = None,
    token_multiple: int = 1,
    alignment: Alignment = NO_ALIGNMENT,
    ring: Sequence[int] | None = None,
) -> CPContext:
    """The context of a pack of samples with these lengths.

    Args:
        group: the CP group.
        rank: this rank's place in the group.
        lengths: tokens of each sample of the pack.
        layout: a layout's name, or a layout for exactly these lengths and this group.
        device: where the pack's tensors lie.
        clock: where waiting is counted.
        exchange: communication inside the group, by default that of its process group.
        token_multiple: a region's module sees a multiple of so many tokens on each rank.
        alignment: the padding that samples get for a region's module.
        ring: the group's places in the order in which hops visit them, by default that of ``exchange``. Who holds which
            tokens does not depend on it.

    Raises:
        PlanError: no tokens, or a layout for other samples or another number of ranks, or one that is not told by its name
            where samples are padded; a ring that is no permutation of the group's places, or not that of ``exchange``.
    """
    padded = None
    if isinstance(layout, str):
        chosen, padded = _layouts(layout, tuple(lengths), group.size, alignment)
    elif alignment:
        raise PlanError(f"samples with padding ({alignment}) need a layout told by its name, not {layout}")
    else:
        chosen = layout
    if (chosen.lengths, chosen.size) != (tuple(lengths), group.size) or not chosen.num_tokens:
        raise PlanError(
            f"a pack of samples of {tuple(lengths)} tokens on {group.size} ranks, with a layout of {chosen.lengths} on "
            f"{chosen.size}: both must be the same, and hold a token"
        )
    ways = exchange or GroupExchange(group, rank, clock or WaitClock(), ring)
    if ring is not None and from_place_0(ring) != from_place_0(ways.ring):
        raise PlanError(f"a context with the ring {tuple(ring)}, of an exchange with the ring {ways.ring}")
    return CPContext(group, rank, chosen, torch.device(device), ways, token_multiple, alignment, padded)


@lru_cache(maxsize=256)
def _layouts(
    name: str, lengths: tuple[int, ...], size: int, alignment: Alignment
) -> tuple[PackLayout, PackLayout | None]:
    """The layout of samples, and that of samples with padding if there is any."""
    padded_lengths = alignment.padded_lengths(lengths, size)
    padded = layout_of(name, padded_lengths, size)
    return (padded, None) if padded_lengths == lengths else (padded.without_padding(lengths), padded)
