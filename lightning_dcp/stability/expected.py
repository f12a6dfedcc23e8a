"""What the plan and the links lead one to expect of a step: seconds of each rank's work, and of each link's hops."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Sequence

from lightning_dcp.parallel.link_table import LinkTable
from lightning_dcp.parallel.rank_times import LinkSummary
from lightning_dcp.schedule.cost import CostModel
from lightning_dcp.schedule.hardware import preset
from lightning_dcp.schedule.plan import Pack, StepPlan

Parts = tuple[float, float, float]
"""Seconds of a rank's work: overhead of packs, what is linear in tokens, attention."""


def work_parts(plan: StepPlan) -> tuple[Parts, ...]:
    """What each rank of the plane computes, by the cost model that the plan was made with (or that of a 7B model).

    As :meth:`~lightning_dcp.schedule.cost.CostModel.pack_seconds`, without hops. Speeds of ranks are not in it: a slow
    rank's expected seconds are those of a sound one.
    """
    model = plan.extra.get("cost_model")
    cost = preset("h100") if model is None else CostModel.from_dict(model, source="the plan's cost_model")
    by_rank: list[list[Parts]] = [[] for _ in range(plan.ranks)]
    for pack in plan.packs():
        parts = _pack_parts(plan, pack, cost)
        for rank in pack.ranks:
            by_rank[rank].append(parts)
    return tuple(
        (math.fsum(p[0] for p in parts), math.fsum(p[1] for p in parts), math.fsum(p[2] for p in parts))
        for parts in by_rank
    )


def _pack_parts(plan: StepPlan, pack: Pack, cost: CostModel) -> Parts:
    lengths = pack.padded_lengths(plan.lengths, plan.alignment)
    tokens = plan.alignment.in_pack(sum(lengths), pack.cp_size)
    attention = math.fsum(cost.attention_seconds(lengths, pack.cp_size).tolist())
    return cost.pack_overhead, cost.linear * tokens / pack.cp_size, attention


class HopExpectation:
    """How long a hop should take: by the table of links, or by what other links needed lately.

    Without a table the plane's own hops tell. What a link is seen to take can be longer than it needs, never shorter, so
    the lower quartile over the other links and the last steps is looked up for each size of message, and of all sizes the
    one that says least is taken: a larger message takes no less than a smaller one, and at most as many times as long as it
    is larger.

    Args:
        table: measured, or None.
        window: steps that are remembered.
    """

    def __init__(self, table: LinkTable | None, window: int) -> None:
        self._table = table
        self._seen: deque[list[tuple[tuple[int, int], int, float]]] = deque(maxlen=window)

    def see(self, links: Sequence[LinkSummary]) -> None:
        """Take in the hops of one step."""
        self._seen.append([((k.source, k.target), _size_class(k.num_bytes / k.hops), k.fastest_s) for k in links])

    def seconds(self, source: int, target: int, num_bytes: float) -> float:
        """Seconds of a hop of so many bytes; 0.0 if nothing is known."""
        if self._table is not None:
            return self._table.seconds(source, target, num_bytes)
        of_size: dict[int, list[float]] = defaultdict(list)
        for step in self._seen:
            for link, size, seconds in step:
                if link != (source, target):
                    of_size[size].append(seconds)
        # one step of one other link is not much to go by, but better than nothing
        found = [_quartile(seen) * max(1.0, num_bytes / (1 << size)) for size, seen in of_size.items()]
        return min(found, default=0.0)


def _size_class(num_bytes: float) -> int:
    """n for messages of 2^n bytes or more, up to 2^(n + 1)."""
    return max(1, int(num_bytes)).bit_length() - 1


def _quartile(values: list[float]) -> float:
    return sorted(values)[(len(values) - 1) // 4]
