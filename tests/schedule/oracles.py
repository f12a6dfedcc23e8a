"""What plans cost, which rules they keep and which are possible, worked out without the package's own code."""

import heapq
import itertools
import math


def sizes_of(ranks):
    return [c for c in range(1, ranks + 1) if ranks % c == 0]


# ------------------------------------------------------------------ seconds


def speed_share(table, tokens):
    """An efficiency table's value: linear between its points, constant beyond its ends."""
    if tokens <= table[0][0]:
        return table[0][1]
    for (left, low), (right, high) in itertools.pairwise(table):
        if tokens <= right:
            return low + (high - low) * (tokens - left) / (right - left)
    return table[-1][1]


def pack_seconds(cost, lengths, c, first_rank=0):
    """The formula in the cost model's docstring, one sample after the other."""
    nodes = {rank // (cost.ranks_per_node or math.inf) for rank in range(first_rank, first_rank + c)}
    across = len(nodes) > 1
    latency, bandwidth = cost.hop_latency, cost.bandwidth
    if across:
        latency = latency if cost.internode_latency is None else cost.internode_latency
        bandwidth = cost.internode_bandwidth or bandwidth
    attention = sum(cost.attention * n**2 / (c * speed_share(cost.efficiency, n / c)) for n in lengths)
    transfer = cost.hop_bytes * sum(lengths) / c / bandwidth if cost.hop_bytes else 0.0
    hop = latency + transfer - cost.overlap * attention / c
    return cost.pack_overhead + cost.linear * sum(lengths) / c + attention + (c - 1) * max(0.0, hop)


def run_seconds(plan, pack, cost, speeds=None):
    seconds = pack_seconds(cost, [plan.lengths[s] for s in pack.samples], pack.cp_size, pack.first_rank)
    return seconds if speeds is None else seconds / min(speeds[rank] for rank in pack.ranks)


def run_by_events(plan, cost, speeds=None):
    """Start and end of each pack, by ``(round, place)``: time moves from one end of a pack to the next.

    Each rank has its own list. A pack starts when it is next on all its ranks and, in lock-step, when all packs of the
    rounds before it have ended.
    """
    names = [(number, place) for number, packs in enumerate(plan.microbatches) for place in range(len(packs))]
    packs = {name: plan.microbatches[name[0]][name[1]] for name in names}
    lists = {rank: [name for name in names if rank in packs[name].ranks] for rank in range(plan.ranks)}
    started, ended, times, events, now = set(), set(), {}, [], 0.0
    while len(ended) < len(names):
        for name in sorted({own[0] for own in lists.values() if own} - started):
            heads = all(lists[rank][0] == name for rank in packs[name].ranks)
            waits = plan.mode == "lockstep" and any(other[0] < name[0] for other in names if other not in ended)
            if heads and not waits:
                started.add(name)
                times[name] = (now, now + run_seconds(plan, packs[name], cost, speeds))
                heapq.heappush(events, (times[name][1], name))
        now, name = heapq.heappop(events)  # fails if all ranks wait
        ended.add(name)
        for rank in packs[name].ranks:
            assert lists[rank].pop(0) == name
    return times


def makespan(plan, cost, speeds=None):
    """When the last rank is done."""
    return max((end for _, end in run_by_events(plan, cost, speeds).values()), default=0.0)


# ------------------------------------------------------------------ rules


def broken_rules(scheduler, lengths, plan):
    """The rules that a plan of this scheduler breaks, counted by hand."""
    broken = []
    ranks, limit = scheduler.ranks, scheduler.max_seqlen_per_dp_cp_rank
    smallest = getattr(scheduler, "min_context_parallel_size", 1)
    largest = getattr(scheduler, "max_context_parallel_size", None) or ranks
    groups = {(first, c) for c in sizes_of(ranks) if smallest <= c <= largest for first in range(0, ranks, c)}
    planned = []
    for number, packs in enumerate(plan.microbatches):
        busy = [rank for pack in packs for rank in range(pack.first_rank, pack.first_rank + pack.cp_size)]
        if len(busy) != len(set(busy)):
            broken.append(f"round {number}: a rank has two packs")
        if scheduler.mode == "lockstep" and len(busy) != ranks:
            broken.append(f"round {number}: a rank has no pack")
        for pack in packs:
            planned += pack.samples
            if (pack.first_rank, pack.cp_size) not in groups:
                broken.append(f"{pack}: not one of the groups")
            if not pack.samples or list(pack.samples) != sorted(set(pack.samples)):
                broken.append(f"{pack}: samples out of order")
            if sum(lengths[s] for s in pack.samples) > pack.cp_size * limit:
                broken.append(f"{pack}: too many tokens")
            if pack.layout != scheduler.layout:
                broken.append(f"{pack}: another layout")
    if sorted(planned) != list(range(len(lengths))):
        broken.append("a sample is not planned once")
    if len(plan.microbatches) % getattr(scheduler, "microbatch_multiple", 1):
        broken.append(f"{len(plan.microbatches)} rounds")
    if plan.lengths != tuple(lengths) or not all(type(length) is int for length in plan.lengths):
        broken.append("other lengths")
    if (plan.ranks, plan.max_seqlen_per_dp_cp_rank, plan.mode) != (ranks, limit, scheduler.mode):
        broken.append("another plane, limit or mode")
    return broken


def crossing(plan, ranks_per_node):
    """Packs whose ranks are in more than one node."""
    return [
        p for p in plan.packs() if p.first_rank // ranks_per_node != (p.first_rank + p.cp_size - 1) // ranks_per_node
    ]


def walk(plan):
    """Ranks walk their own lists; a pack runs when all its ranks have come to it. What is left when nothing moves."""
    waiting = {rank: list(plan.packs_of(rank)) for rank in range(plan.ranks)}
    moved = True
    while moved:
        moved = False
        for rank in range(plan.ranks):
            while waiting[rank]:
                pack = waiting[rank][0]
                if not all(waiting[peer] and waiting[peer][0] is pack for peer in pack.ranks):
                    break
                for peer in pack.ranks:
                    waiting[peer].pop(0)
                moved = True
    return {rank: left for rank, left in waiting.items() if left}


# ------------------------------------------------------------------ all plans


def fewest_packs(lengths, capacity):
    """The fewest packs that hold all samples: exact for up to ten samples, by first fit for more."""
    if len(lengths) > 10:
        packs = []
        for length in sorted(lengths, reverse=True):
            at = next((i for i, tokens in enumerate(packs) if tokens + length <= capacity), len(packs))
            packs[at : at + 1] = [length + (packs[at] if at < len(packs) else 0)]
        return len(packs)
    best = {0: (1, 0)}  # of each set of samples: packs, and tokens in the last one
    for subset in range(1, 1 << len(lengths)):
        options = []
        for sample in (s for s in range(len(lengths)) if subset >> s & 1):
            packs, tokens = best[subset ^ 1 << sample]
            fits = tokens + lengths[sample] <= capacity
            options.append((packs, tokens + lengths[sample]) if fits else (packs + 1, lengths[sample]))
        best[subset] = min(options)
    return best[(1 << len(lengths)) - 1][0]


def lockstep_is_possible(lengths, ranks, limit, c, multiple=1):
    """Whether some number of rounds lets every group of c ranks have samples in each.

    Packs of groups inside one block of c ranks could be one pack of the block, so a plan with groups that nest in such
    blocks exists only if this one does. More packs than the fewest can be made as long as there are samples.
    """
    if max(lengths) > c * limit:
        return False
    step = ranks // c * multiple
    return -(-fewest_packs(lengths, c * limit) // step) * step <= len(lengths)


def all_packs(lengths, left, block, limit):
    """The sets of samples out of ``left`` that fit on a block, as tuples."""
    for count in range(1, len(left) + 1):
        for own in itertools.combinations(sorted(left), count):
            if sum(lengths[s] for s in own) <= block[1] * limit:
                yield own


class Cheapest:
    """The seconds of the best of all valid plans of a small batch, by trying them all."""

    def __init__(self, lengths, ranks, limit, cost, speeds=None):
        self.lengths, self.ranks, self.limit, self.cost = lengths, ranks, limit, cost
        self.speeds = speeds or [1.0] * ranks
        self.blocks = [(first, c) for c in sizes_of(ranks) for first in range(0, ranks, c)]
        self.known = {}

    def seconds(self, block, own):
        if (block, own) not in self.known:
            first, c = block
            seconds = pack_seconds(self.cost, [self.lengths[s] for s in own], c, first)
            self.known[block, own] = seconds / min(self.speeds[first : first + c])
        return self.known[block, own]

    def free(self):
        """Every sequence of packs on every block."""
        best = math.inf

        def go_on(left, ends):
            nonlocal best
            if not left:
                best = max(ends)
                return
            for first, c in self.blocks:
                for own in all_packs(self.lengths, left, (first, c), self.limit):
                    end = max(ends[first : first + c]) + self.seconds((first, c), own)
                    if end < best:
                        go_on(left - set(own), ends[:first] + [end] * c + ends[first + c :])

        go_on(frozenset(range(len(self.lengths))), [0.0] * self.ranks)
        return best

    def lockstep(self, multiple=1):
        """Every sequence of rounds; infinite if there is none."""
        best = math.inf

        def one_round(left, first, longest):
            """What is left and how long it takes, for each way to fill the ranks from ``first`` on."""
            if first == self.ranks:
                yield left, longest
                return
            for block in [b for b in self.blocks if b[0] == first]:
                for own in all_packs(self.lengths, left, block, self.limit):
                    seconds = max(longest, self.seconds(block, own))
                    yield from one_round(left - set(own), first + block[1], seconds)

        def go_on(left, rounds, took):
            nonlocal best
            if not left and rounds % multiple == 0:
                best = min(best, took)
            for after, seconds in one_round(left, 0, 0.0) if left else ():
                if took + seconds < best:
                    go_on(after, rounds + 1, took + seconds)

        go_on(frozenset(range(len(self.lengths))), 0, 0.0)
        return best
