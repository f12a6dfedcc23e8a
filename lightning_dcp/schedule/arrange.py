"""One lock-step arrangement: so many rounds, and a CP size for each sample."""

from __future__ import annotations

import math
from collections.abc import Iterator
from heapq import heapify, heappop, heappush, heapreplace

import numpy as np

from lightning_dcp.schedule.bins import Bin, Round, distribute, step_seconds, take_places
from lightning_dcp.schedule.polish import polish
from lightning_dcp.schedule.workload import Sizes, Workload


def arrange(load: Workload, sizes: Sizes, count: int) -> list[Round] | None:
    """``count`` rounds in which every rank has a pack, or ``None`` if these sizes do not allow it.

    1. Samples that are cut form packs of their own size, the longest packs together in the first rounds.
    2. The ranks left over become packs of the smallest size. A round of long packs takes as long as these do; the
       others rise to a common level.
    3. All other samples, longest first, go to the pack that is furthest below its round's time and has room; so long
       packs take short samples in until their round is even.
    """
    smallest = load.sizes[0]
    levels = {c: np.flatnonzero(sizes == c).tolist() for c in reversed(load.sizes)}
    work = {c: sum([load.share(c)[s] for s in samples]) for c, samples in levels.items()}
    average = sum([c * seconds for c, seconds in work.items()]) / (count * load.ranks)
    cut: list[Bin] = []
    for c, samples in levels.items():
        if c != smallest and samples:
            cut += _cut_bins(load, c, samples, work[c] / average)
    rounds = distribute(cut, load.ranks, count)
    if rounds is None:
        return None
    longest = [max([b.end for b in packs], default=0.0) for packs in rounds]
    level = _water_level(longest, count * (average + load.cost.pack_overhead))
    for packs, end in zip(rounds, longest, strict=True):
        packs += [Bin(smallest) for _ in range((load.ranks - sum(b.c for b in packs)) // smallest)]
        for b in packs:
            b.target = max(end, level)
        if load.speeds is not None:
            take_places(packs, load)
    if not _fill(load, levels[smallest], [b for packs in rounds for b in packs]):
        return None
    filled = _without_gaps(load, rounds)
    return None if filled is None else _best_order(load, filled)


def even_out(load: Workload, rounds: list[Round]) -> list[Round]:
    """Move and swap samples between packs of the smallest size, so that none is longer than its round need be."""
    c = load.sizes[0]
    movable = [[b for b in packs if b.c == c] for packs in rounds]
    own = [b for bins in movable for b in bins]
    if len(own) < 2:
        return rounds
    for packs, bins in zip(rounds, movable, strict=True):
        cut = max([b.end for b in packs if b.c != c], default=0.0)
        for b in bins:
            b.target = max(cut, sum([other.end for other in bins]) / len(bins))
    held = [list(b.samples) for b in own]
    slacks = [b.slack for b in own]
    speeds = [b.speed for b in own]
    polish(load, c, slacks, held, speeds, good=sum(slacks) / len(slacks), changes=2 * len(own), one_pack=True)
    evened = {id(b): b.with_samples(sorted(samples), load) for b, samples in zip(own, held, strict=True)}
    return _best_order(load, [[evened.get(id(b), b) for b in packs] for packs in rounds])


def _best_order(load: Workload, rounds: list[Round]) -> list[Round]:
    """The rounds as they are, or their packs dealt out anew by length, if that is faster."""
    again = distribute([b.with_samples(b.samples, load) for packs in rounds for b in packs], load.ranks, len(rounds))
    choices = [rounds] if again is None else [rounds, again]
    for choice in choices:
        if load.speeds is not None:
            for packs in choice:
                take_places(packs, load)
    return min(choices, key=step_seconds)


def _cut_bins(load: Workload, c: int, samples: list[int], wanted: float) -> list[Bin]:
    """Packs of samples of one size: about as many as wanted, each about as long as the others."""
    tokens = sum([load.lengths[s] for s in samples])
    count = min(max(math.ceil(wanted - 1e-9), -(-tokens // (c * load.limit))), len(samples))
    bins = [Bin(c) for _ in range(count)]
    for sample in samples:
        fitting = [b for b in bins if b.has_room(sample, load)]
        if not fitting:
            bins.append(Bin(c))
            fitting = bins[-1:]
        min(fitting, key=lambda b: b.seconds).add(sample, load)
    return bins


def _water_level(longest: list[float], total: float) -> float:
    """The level to which shorter rounds must rise for all together to take ``total`` seconds."""
    rising = sorted(longest)
    for number in range(len(rising), 0, -1):
        level = (total - sum(rising[number:])) / number
        if level >= rising[number - 1]:
            return level
    return 0.0


def _fill(load: Workload, samples: list[int], bins: list[Bin]) -> bool:
    """Each sample, longest first, into the bin that is furthest below its target; whether all found room."""
    room = [b.c * load.limit - b.tokens for b in bins]
    heap = [(b.slack, number) for number, b in enumerate(bins)]
    heapify(heap)
    parked: list[tuple[int, int]] = []  # (-room, number) of bins without room for this length, most room first
    for sample in samples:
        length = load.lengths[sample]
        while parked and -parked[0][0] >= length:
            number = heappop(parked)[1]
            heappush(heap, (bins[number].slack, number))
        while heap and room[heap[0][1]] < length:
            number = heappop(heap)[1]
            heappush(parked, (-room[number], number))
        if not heap:
            return False
        number = heap[0][1]
        bins[number].add(sample, load)
        room[number] -= length
        heapreplace(heap, (bins[number].slack, number))
    return True


def _without_gaps(load: Workload, rounds: list[Round]) -> list[Round] | None:
    """Rounds in which every rank has a pack: the ranks of empty bins go to packs that are split or cut further."""
    done = []
    for packs in rounds:
        used = [b for b in packs if b.samples]
        while spare := load.ranks - sum(b.c for b in used):
            grown = next(_grown(load, used, spare), None)
            if grown is None:
                return None
            used = grown
        done.append(used)
    return done


def _grown(load: Workload, packs: Round, spare: int) -> Iterator[Round]:
    """The packs with the longest one that can use spare ranks split in two, or cut over more ranks."""
    for b in sorted(packs, key=lambda b: -b.end):
        others = [other for other in packs if other is not b]
        if len(b.samples) > 1 and b.c <= spare:
            halves = [Bin(b.c), Bin(b.c)]
            for sample in b.samples:
                min(halves, key=lambda half: half.seconds).add(sample, load)
            yield others + halves
        wider = next((c for c in load.sizes if c > b.c), None)
        if wider is not None and wider - b.c <= spare:
            yield [*others, Bin(wider).with_samples(b.samples, load)]
