"""Which exchange scheme is fastest for a call: from the cost model, the head counts and the links."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from lightning_dcp.attention.schemes.heads import HeadSplit
from lightning_dcp.attention.shape import AttentionShape
from lightning_dcp.parallel.blocks import AttentionMask
from lightning_dcp.parallel.context import CPContext
from lightning_dcp.parallel.links import Link
from lightning_dcp.schedule.cost import CostModel, FloatArray

_log = logging.getLogger(__name__)

RING_MARGIN = 1.05
"""Another scheme must be better than the ring by this factor: estimates are no more exact, and the ring holds the least."""
_QUERIES = 1 << 14
"""So many queries at most are looked at to see how a pack's work is spread over ranks."""


@dataclass(frozen=True)
class Estimate:
    """What one call takes by each scheme, forward and backward, on the slowest rank.

    Attributes:
        seconds: by scheme.
        scheme: which of them to use.
    """

    seconds: Mapping[str, float]

    @property
    def scheme(self) -> str:
        """The ring unless another is clearly faster."""
        best = min(self.seconds, key=self.seconds.__getitem__)
        return "ring" if self.seconds["ring"] <= RING_MARGIN * self.seconds[best] else best

    def __str__(self) -> str:
        times = ", ".join(f"{name} {1e3 * seconds:.3g} ms" for name, seconds in self.seconds.items())
        return f"{self.scheme} (estimated: {times})"


class SchemeChooser:
    """Chooses a scheme for each call; the same on all ranks of a group, since all know the same.

    Args:
        cost: of a pack; its attention and hops stand for all layers, of which a call is one.
        links: measured hops by group size; by default those of the cost model.
        say: is told what is picked, once for each kind of call; by default this module's logger.

    Attributes:
        links: as given.
        picked: calls by group size and scheme.
    """

    def __init__(
        self, cost: CostModel, links: Mapping[int, Link] | None = None, say: Callable[[str], None] = _log.info
    ) -> None:
        self._cost, self.links, self._say = cost, links, say
        self._known: WeakKeyDictionary[CPContext, dict[tuple[AttentionShape, AttentionMask], str]] = WeakKeyDictionary()
        self._told: set[tuple[int, AttentionShape, str]] = set()
        self.picked: Counter[tuple[int, str]] = Counter()

    def __call__(self, shape: AttentionShape, mask: AttentionMask, context: CPContext) -> str:
        """The scheme of a call."""
        if context.size == 1:
            return "ring"
        known = self._known.setdefault(context, {})
        if (shape, mask) not in known:
            estimate = self.estimate(shape, mask, context)
            known[shape, mask] = estimate.scheme
            self._tell(shape, context, estimate)
        self.picked[context.size, known[shape, mask]] += 1
        return known[shape, mask]

    def _tell(self, shape: AttentionShape, context: CPContext, estimate: Estimate) -> None:
        what = context.size, shape, estimate.scheme
        if context.rank == 0 and what not in self._told:
            self._told.add(what)
            self._say(
                f"Attention of {shape.heads} query and {shape.kv_heads} key heads on {context.size} ranks, for example "
                f"{context.layout.num_tokens} tokens in {len(context.layout.lengths)} sample(s): {estimate}"
            )

    def estimate(self, shape: AttentionShape, mask: AttentionMask, context: CPContext) -> Estimate:
        """What the call takes by each scheme."""
        c, lengths = context.size, context.layout.lengths
        calls, link = self._calls(shape), self._link(shape, c)
        share, pairs = _pairs(mask, context)
        split, whole = (share / calls * n * math.fsum(self._cost.attention_seconds(lengths, n)) for n in (c, 1))
        shard = context.layout.num_tokens / c
        return Estimate(
            {
                "ring": _ring(split * pairs, shard, shape, link, self._cost.overlap),
                "all_gather": split * float(pairs.sum(1).max()) + _all_gather(c, shard, shape, link),
                "ulysses": whole * _largest_share(shape, c) + _ulysses(c, shard, shape, link),
            }
        )

    def _calls(self, shape: AttentionShape) -> float:
        """Calls like this one of which the cost model's attention is made, by what its hops carry."""
        carried = shape.forward_bytes + shape.backward_bytes
        return self._cost.hop_bytes / carried if self._cost.hop_bytes else 1.0

    def _link(self, shape: AttentionShape, size: int) -> Link:
        if self.links is not None and size in self.links:
            return self.links[size]
        nodes = self._cost.ranks_per_node is not None and size > self._cost.ranks_per_node
        latency, _ = self._cost.hop_seconds(spans_nodes=nodes)
        bandwidth = (self._cost.internode_bandwidth if nodes else None) or self._cost.bandwidth or math.inf
        return Link(latency / self._calls(shape) / 2, bandwidth)  # the model's latency is of a hop forward and one back


def _pairs(mask: AttentionMask, context: CPContext) -> tuple[float, FloatArray]:
    """Pairs of tokens that see each other, over those of causal text; and each (query rank, key rank)'s part of them.

    By a sample of the queries, evenly over the pack.
    """
    layout, c = context.layout, context.size
    owner = np.empty(layout.num_tokens, dtype=np.int64)
    for rank in range(c):
        owner[layout.pack_index(rank).numpy()] = rank
    first, last = mask.bounds(layout.lengths)
    causal = np.asarray(layout.lengths, dtype=np.float64)
    total = float((last - first + 1).sum())
    queries = _some(layout.num_tokens)
    pairs = np.zeros((c, c))
    for rank in range(c):
        before = np.concatenate([[0], np.cumsum(owner == rank)])
        seen = before[last[queries] + 1] - before[first[queries]]
        pairs[:, rank] = np.bincount(owner[queries], weights=seen, minlength=c)
    return total / float((causal * (causal + 1) / 2).sum()), pairs / pairs.sum()


def _some(tokens: int) -> NDArray[np.int64]:
    """All queries, or one out of each stretch of the pack, at a place that follows no pattern of lengths or chunks."""
    step = -(-tokens // _QUERIES)
    stretches = np.arange(tokens // step, dtype=np.int64)
    return stretches * step + stretches * 40_503 % 65_537 % step


def _ring(work: FloatArray, shard: float, shape: AttentionShape, link: Link, overlap: float) -> float:
    """Hop by hop: the slowest rank's compute, and what the transfer takes beyond it."""
    c = len(work)
    transfer = 2 * link.latency_s + shard * (shape.forward_bytes + shape.backward_bytes) / link.bandwidth
    ranks = np.arange(c)
    hops = [float(work[ranks, (ranks - hop) % c].max()) for hop in range(c)]
    return math.fsum(hops) + math.fsum(max(0.0, transfer - overlap * hop) for hop in hops[:-1])


def _all_gather(c: int, shard: float, shape: AttentionShape, link: Link) -> float:
    """Two gathers of keys and values, and a reduce-scatter of their gradients; none of them under compute."""
    return (c - 1) * (3 * link.latency_s + shard * (shape.forward_bytes + shape.backward_bytes) / link.bandwidth)


def _ulysses(c: int, shard: float, shape: AttentionShape, link: Link) -> float:
    """Two all-to-alls forward and two backward; none of them under compute."""
    split = HeadSplit(shape.heads, shape.kv_heads, c)
    kv_heads = sum(split.keys(rank).stop - split.keys(rank).start for rank in range(c))
    kv = kv_heads * (shape.head_dim + shape.v_head_dim)
    narrow = (shape.q_numbers + kv + 2 * shape.out_numbers) * shape.dtype.itemsize
    wide = (shape.q_numbers + kv) * shape.wide.itemsize
    return 4 * link.latency_s + shard * (c - 1) / c * (narrow + wide) / link.bandwidth


def _largest_share(shape: AttentionShape, c: int) -> float:
    """The part of all heads that the busiest rank computes."""
    return -(-shape.heads // c) / shape.heads
