"""One lock-step arrangement: so many rounds, and a CP size for each sample."""

from __future__ import annotations

import math
from collections.abc import Iterator
from copy import copy
from heapq import heapify, heappop, heappush, heapreplace
from itertools import islice

import numpy as np

from lightning_dcp.schedule.bins import Bin, Round, distribute, step_seconds, take_places
from lightning_dcp.schedule.polish import polish
from lightning_dcp.schedule.workload import Sizes, Workload

EVEN = 2e-3
"""Part of a round that a pack may be longer than the others."""
GROWTHS, WAYS = 100, 4
"""How many sets of packs are looked at, beside one for each rank, and how many ways on from each."""
CHANGES = 100
"""Most samples that are moved to even an arrangement out."""


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
    work = {c: math.fsum([load.share(c)[s] for s in samples]) for c, samples in levels.items()}
    average = math.fsum([c * seconds for c, seconds in work.items()]) / (count * load.ranks)
    long = [s for s in levels[smallest] if load.share(smallest)[s] > average]  # make their round long by themselves
    levels[smallest] = levels[smallest][len(long) :]
    cut = [Bin(smallest).with_samples([s], load) for s in long]
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
        target = max([b.end for b in packs if b.c != c], default=0.0)
        target = max(target, math.fsum([b.end for b in bins]) / max(len(bins), 1))
        for b in bins:
            b.target = target
    held = [list(b.samples) for b in own]
    slacks = [b.slack for b in own]
    speeds = [b.speed for b in own]
    good = math.fsum(slacks) / len(slacks) + EVEN * step_seconds(rounds) / len(rounds)
    polish(load, c, slacks, held, speeds, good=good, changes=min(2 * len(own), CHANGES), one_pack=True)
    changed = [(b, samples) for b, samples in zip(own, held, strict=True) if samples != b.samples]
    evened = {id(b): b.with_samples(sorted(samples), load) for b, samples in changed}
    return _best_order(load, [[evened.get(id(b), b) for b in packs] for packs in rounds])


def _best_order(load: Workload, rounds: list[Round]) -> list[Round]:
    """The rounds as they are, or their packs dealt out anew by length, if that is faster."""
    bins = [b for packs in rounds for b in packs]
    if load.speeds is not None:  # a bin's speed is that of its place
        bins = [copy(b) for b in bins]
    again = distribute(bins, load.ranks, len(rounds))
    choices = [rounds] if again is None else [rounds, again]
    if load.speeds is not None:
        for packs in (packs for choice in choices for packs in choice):
            take_places(packs, load)
    return min(choices, key=step_seconds)


def _cut_bins(load: Workload, c: int, samples: list[int], wanted: float) -> list[Bin]:
    """Packs of samples of one size: about as many as wanted, each about as long as the others."""
    tokens = sum([load.padded(c)[s] for s in samples])
    count = min(max(math.ceil(wanted - 1e-9), -(-tokens // (c * load.limit))), len(samples))
    bins = [Bin(c).with_samples([sample], load) for sample in samples[:count]]
    heap = [(b.seconds, number) for number, b in enumerate(bins)]
    heapify(heap)
    for sample in samples[count:]:
        if not bins[heap[0][1]].has_room(sample, load):
            bins.append(Bin(c))
            heappush(heap, (0.0, len(bins) - 1))
        number = heap[0][1]
        bins[number].add(sample, load)
        heapreplace(heap, (bins[number].seconds, number))
    return bins


def _water_level(longest: list[float], total: float) -> float:
    """The level to which shorter rounds must rise for all together to take ``total`` seconds."""
    rising = sorted(longest)
    for number in range(len(rising), 0, -1):
        level = (total - math.fsum(rising[number:])) / number
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
        while heap and room[heap[0][1]] < load.padded(bins[heap[0][1]].c)[sample]:
            number = heappop(heap)[1]
            heappush(parked, (-room[number], number))
        if not heap:
            return False
        number = heap[0][1]
        bins[number].add(sample, load)
        room[number] -= load.padded(bins[number].c)[sample]
        heapreplace(heap, (bins[number].slack, number))
    return True


def _without_gaps(load: Workload, rounds: list[Round]) -> list[Round] | None:
    """Rounds in which every rank has a pack: the ranks of empty bins go to packs that are split or cut further."""
    done = []
    for packs in rounds:
        grown = _grow(load, [b for b in packs if b.samples], load.ranks)
        if grown is None:
            return None
        done.append(grown)
    return done


def any_arrangement(load: Workload, multiple: int) -> list[Round] | None:
    """Some arrangement of a batch with few samples for its ranks, or ``None`` if none was found.

    Samples share as few groups as they fit in, each of the smallest size; then groups are split or cut further until
    they fill a number of rounds.
    """
    bins: list[Bin] = []
    for sample, c in enumerate(load.smallest_within(math.inf).tolist()):
        fitting = [b for b in bins if b.has_room(sample, load)]
        if not fitting:
            bins.append(Bin(c))
            fitting = bins[-1:]
        min(fitting, key=lambda b: b.c * load.limit - b.tokens).add(sample, load)
    fewest = -(-sum(b.c for b in bins) // (load.ranks * multiple)) * multiple
    most = len(load.lengths) * load.sizes[-1] // load.ranks
    for count in range(fewest, most + 1, multiple):
        grown = _grow(load, bins, count * load.ranks)
        if grown is not None and (rounds := distribute(grown, load.ranks, count)) is not None:
            return _best_order(load, rounds)
    return None


def _grow(load: Workload, packs: Round, ranks: int) -> Round | None:
    """The packs, split or cut further until they fill so many ranks; the longest first, and else in another order."""
    waiting, looked_at = [packs], 0
    while waiting and looked_at < GROWTHS + ranks:
        packs = waiting.pop()
        looked_at += 1
        spare = ranks - sum(b.c for b in packs)
        if spare == 0:
            return packs
        waiting += reversed(list(islice(_grown(load, packs, spare), WAYS)))
    return None


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
