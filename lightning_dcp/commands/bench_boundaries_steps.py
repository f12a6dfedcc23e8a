"""Simulated steps of ``lightning-dcp bench boundaries``: how long a pack takes on a ring of ranks, and how steadily."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from random import Random
from typing import Any

from lightning_dcp.boundaries.budget import BoundaryBudget
from lightning_dcp.boundaries.pieces import Work, pieces_of, shard_loads
from lightning_dcp.commands.bench_boundaries_chats import ChatPack
from lightning_dcp.parallel.layout import PackLayout
from lightning_dcp.parallel.link_table import LinkTable
from lightning_dcp.parallel.links import Link
from lightning_dcp.parallel.ring_order import hop_links
from lightning_dcp.parallel.ring_orders import RingOrders
from lightning_dcp.schedule.cost import CostModel

Cut = Callable[[ChatPack], PackLayout]


@dataclass(frozen=True)
class Machine:
    """The ranks of one group and the links between them.

    Attributes:
        size: ranks.
        cost: what tokens cost, and what a hop carries for each.
        slow_link: the two ranks whose link, in both directions, is slow in some steps.
        slow_share: of the steps, in which it is.
        slowdown: how many times slower it is then.
        jitter: mean of the random part, exponentially distributed, by which any hop takes longer, as a share of its time.
    """

    size: int
    cost: CostModel
    slow_link: tuple[int, int] = (3, 4)
    slow_share: float = 0.1
    slowdown: float = 2.0
    jitter: float = 0.1

    @cached_property
    def links(self) -> LinkTable:
        """Latency and bandwidth of all links, as they are when none is slow."""
        return self._links(1.0)

    @cached_property
    def measured(self) -> LinkTable:
        """The same on average, as a measurement finds them."""
        return self._links(1.0 + self.slow_share * (self.slowdown - 1.0))

    def is_slow(self, source: int, target: int) -> bool:
        """Whether a link is the one that is slow at times."""
        return {source, target} == set(self.slow_link)

    def _links(self, slower: float) -> LinkTable:
        places = range(self.size)
        times = [[slower if self.is_slow(i, j) else 1.0 for j in places] for i in places]
        link = Link(self.cost.hop_latency, self.cost.bandwidth or math.inf)
        latency = tuple(tuple(times[i][j] * link.latency_s * (i != j) for j in places) for i in places)
        return LinkTable(latency, tuple(tuple(link.bandwidth / times[i][j] * (i != j) for j in places) for i in places))


@dataclass(frozen=True)
class Case:
    """One way to cut packs and to order the ring.

    Attributes:
        name: for the table.
        cut: the layout of a pack.
        rings: by which the keys of a pack travel.
    """

    name: str
    cut: Cut
    rings: RingOrders


@dataclass(frozen=True)
class Steadiness:
    """Simulated steps of one case.

    Attributes:
        name: of the case.
        seconds: of each step.
        tokens: of all steps.
        ideal_s: seconds of all steps if work were even and no hop held anyone up.
    """

    name: str
    seconds: tuple[float, ...]
    tokens: int
    ideal_s: float

    def quantile(self, share: float) -> float:
        """Seconds that this share of the steps take at most: the least such step."""
        ordered = sorted(self.seconds)
        return ordered[math.ceil(share * len(ordered)) - 1]

    @property
    def ratio(self) -> float:
        """p99 over p50."""
        return self.quantile(0.99) / self.quantile(0.5)

    @property
    def throughput(self) -> float:
        """Tokens a second, over all steps."""
        return self.tokens / math.fsum(self.seconds)

    @property
    def share_of_ideal(self) -> float:
        """Ideal time of all steps over theirs."""
        return self.ideal_s / math.fsum(self.seconds)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        numbers = {name: getattr(self, name) for name in ("ratio", "throughput", "share_of_ideal")}
        return dataclasses.asdict(self) | {"p50": self.quantile(0.5), "p99": self.quantile(0.99)} | numbers


def simulate_steps(
    case: Case, packs: Sequence[ChatPack], machine: Machine, budget: BoundaryBudget, seed: int
) -> Steadiness:
    """Run each pack on paper.

    A layer's linear parts take as long as on the rank with most of them. Its attention takes a round for each hop of the ring
    and one before: a round is as long as the attention of the rank with most, a part 1/c of it, or as the slowest hop that
    goes on meanwhile, whichever takes longer. Each hop of a round carries the keys of another rank's shard, and takes its
    link's time, and at random longer. All layers are added up, so the rounds are those of the whole step.

    Args:
        case: how packs are cut, and the order of the ring.
        packs: a step each.
        machine: the ranks and links.
        budget: tells which segments are dense.
        seed: of the hops' times; a hop of a step has the same luck in all cases.
    """
    work = Work.of(machine.cost)
    seconds, ideal = [], 0.0
    for step, pack in enumerate(packs):
        layout = case.cut(pack)
        loads = shard_loads(layout, pieces_of(pack.lengths, pack.segments, budget), work)
        attention = [_attention(layout, rank, work) for rank in range(machine.size)]
        linear = [load.work_s - own for load, own in zip(loads, attention, strict=True)]
        ring = case.rings.for_group(0, machine.size, [load.dense_tokens for load in loads])
        tokens = [load.tokens for load in loads]
        rounds = _rounds(ring, tokens, max(attention) / machine.size, machine, Random(f"{seed} {step}"))
        seconds.append(max(linear) + rounds)
        ideal += math.fsum(load.work_s for load in loads) / machine.size
    return Steadiness(case.name, tuple(seconds), sum(sum(pack.lengths) for pack in packs), ideal)


def _attention(layout: PackLayout, rank: int, work: Work) -> float:
    return work.attention * sum(chunk.end**2 - chunk.start**2 for chunk in layout.ranks[rank])


def _rounds(ring: Sequence[int], tokens: Sequence[int], compute_s: float, machine: Machine, random: Random) -> float:
    """Seconds of the rounds of attention: the first without a hop behind it, each other one with a hop on every link."""
    size, total = machine.size, compute_s
    slow = machine.slowdown if random.random() < machine.slow_share else 1.0
    for hop in range(1, size):
        slowest = 0.0
        for step, (source, target) in enumerate(hop_links(ring)):
            owner = ring[(step - hop + 1) % size]  # whose keys the source sends on
            hop_s = machine.links.seconds(source, target, machine.cost.hop_bytes * tokens[owner])
            late = 1.0 + machine.jitter * random.expovariate(1.0)
            slowest = max(slowest, hop_s * late * (slow if machine.is_slow(source, target) else 1.0))
        total += max(compute_s, slowest)
    return total
