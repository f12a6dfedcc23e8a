"""Samples on blocks of ranks, largest blocks first: who is done when."""

from __future__ import annotations

from heapq import heapify, heapreplace
from typing import NamedTuple

import numpy as np

from lightning_dcp.schedule.packing import best_fit
from lightning_dcp.schedule.plan import Pack
from lightning_dcp.schedule.polish import polish
from lightning_dcp.schedule.workload import Sizes, Workload

Block = tuple[int, int]
"""``(first_rank, cp_size)``."""


class Placement(NamedTuple):
    """When each rank is done, and the samples of each block, largest blocks first, as they will run."""

    ends: list[float]
    blocks: dict[Block, list[int]]

    @property
    def step(self) -> float:
        """Seconds until the last rank is done."""
        return max(self.ends)


def place(load: Workload, sizes: Sizes) -> Placement:
    """Each sample, largest size and longest first, on the block of its size that will be done earliest."""
    ends = [0.0] * load.ranks
    blocks: dict[Block, list[int]] = {}
    for c in reversed(load.sizes):
        samples = np.flatnonzero(sizes == c).tolist()
        if samples:
            before = [max(ends[first : first + c]) for first in range(0, load.ranks, c)]
            done, taken = _on_blocks(load, c, samples, before)
            for number, own in taken.items():
                blocks[number * c, c] = own
                ends[number * c : (number + 1) * c] = [done[number]] * c
    return Placement(ends, blocks)


def _on_blocks(
    load: Workload, c: int, samples: list[int], before: list[float]
) -> tuple[list[float], dict[int, list[int]]]:
    """Samples of one size on its blocks: when each is done, and what it holds."""
    if load.speeds is not None:
        return _on_unlike_blocks(load, c, samples, before)
    overhead, lengths, seconds, capacity = load.cost.pack_overhead, load.padded(c), load.share(c), c * load.limit
    done = [start + overhead for start in before]
    ready = [(end, number, capacity) for number, end in enumerate(done)]
    heapify(ready)
    taken: dict[int, list[int]] = {}
    for sample in samples:
        end, number, room = ready[0]
        taken.setdefault(number, []).append(sample)
        end += seconds[sample]
        room -= lengths[sample]
        if room < 0:  # one more pack
            end += overhead
            room += capacity
        done[number] = end
        heapreplace(ready, (end, number, room))
    return done, taken


def _on_unlike_blocks(
    load: Workload, c: int, samples: list[int], before: list[float]
) -> tuple[list[float], dict[int, list[int]]]:
    """The same where blocks differ in speed: the one that would be done first is not the one that is free first."""
    speeds = np.array(load.block_speeds(c))
    seconds, overhead, capacity = load.share(c), load.cost.pack_overhead, c * load.limit
    done = np.array(before) + overhead / speeds
    room = np.full(len(before), capacity)
    taken: dict[int, list[int]] = {}
    for sample in samples:
        length = load.padded(c)[sample]
        later = done + (seconds[sample] + overhead * (room < length)) / speeds
        number = int(later.argmin())
        taken.setdefault(number, []).append(sample)
        done[number] = later[number]
        room[number] += (capacity if room[number] < length else 0) - length
    return done.tolist(), taken


def even_out(load: Workload, placed: Placement, good: float) -> Placement:
    """Move and swap samples of the smallest size in use between blocks, until ``good`` seconds or no change helps."""
    c = min(size for _, size in placed.blocks)  # what runs last
    held = [list(placed.blocks.get((first, c), [])) for first in range(0, load.ranks, c)]
    ends = [max(placed.ends[first : first + c]) for first in range(0, load.ranks, c)]
    ends = polish(load, c, ends, held, load.block_speeds(c), good=good, changes=2 * len(held))
    others = {block: samples for block, samples in placed.blocks.items() if block[1] != c}
    evened = {(number * c, c): sorted(own) for number, own in enumerate(held) if own}
    return Placement([end for end in ends for _ in range(c)], others | evened)


def packed(load: Workload, placed: Placement, layout: str) -> tuple[float, list[Pack]]:
    """The packs of a placement, in order of execution, and the exact time of the step."""
    packs = []
    free = [0.0] * load.ranks
    for (first, c), samples in placed.blocks.items():
        end = max(free[first : first + c])
        for own in best_fit(samples, load.padded(c), c * load.limit):
            end += load.seconds_at(first, c, own)
            packs.append(Pack(first, c, tuple(sorted([load.order[s] for s in own])), layout))
        free[first : first + c] = [end] * c
    return max(free), packs
