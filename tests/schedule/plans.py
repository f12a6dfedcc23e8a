"""Random plans and batches, and a simulator that knows nothing of the package's own."""

import os
import random
import subprocess
import sys

from hypothesis import strategies as st

from lightning_dcp.schedule import Pack, StepPlan

PLANES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


def sizes_of(ranks):
    return [c for c in range(1, ranks + 1) if ranks % c == 0]


@st.composite
def plans(draw, mode=None):
    """Valid plans, in free mode or in lock-step, with groups of random sizes and packs of random samples."""
    ranks = draw(st.sampled_from([1, 2, 3, 4, 6, 8, 12]))
    mode = draw(st.sampled_from(["free", "lockstep"])) if mode is None else mode
    layouts = st.sampled_from(["zigzag", "contiguous"])
    groups = []  # of each round
    for _ in range(draw(st.integers(1, 3))):
        chosen, first = [], 0
        while first < ranks:
            c = draw(st.sampled_from([c for c in sizes_of(ranks) if first % c == 0 and first + c <= ranks]))
            if mode == "lockstep" or not chosen or draw(st.booleans()):
                chosen.append((first, c))
            first += c
        groups.append(chosen)
    packs = sum(map(len, groups))
    counts = draw(st.lists(st.integers(1, 3), min_size=packs, max_size=packs))
    samples = sum(counts)
    lengths = draw(st.lists(st.integers(1, 9), min_size=samples, max_size=samples))
    order = draw(st.permutations(range(samples)))
    rounds, taken, number = [], 0, 0
    for chosen in groups:
        microbatch = []
        for first, c in chosen:
            own = sorted(order[taken : taken + counts[number]])
            microbatch.append(Pack(first, c, tuple(own), draw(layouts)))
            taken, number = taken + counts[number], number + 1
        rounds.append(tuple(microbatch))
    limit = max(-(-p.tokens(lengths) // p.cp_size) for microbatch in rounds for p in microbatch)
    return StepPlan(ranks, limit, tuple(lengths), tuple(rounds), mode)


@st.composite
def batches(draw, planes=PLANES):
    """A plane, a limit a rank, and lengths that fit: many short samples, some of any length."""
    ranks = draw(st.sampled_from(planes))
    limit = draw(st.sampled_from([1, 3, 16, 1000, 8192]))
    short = st.integers(1, min(limit, 60))
    lengths = draw(st.lists(st.one_of(short, st.integers(1, ranks * limit)), min_size=1, max_size=40))
    return ranks, limit, lengths


def lognormal_lengths(seed, ranks, limit):
    """Lengths as text corpora have them: mostly short, with a heavy tail."""
    generator = random.Random(seed)
    samples = generator.choice([ranks, 2 * ranks, 8 * ranks, 64])
    centre, spread = generator.choice([6, 7, 8]), generator.choice([1.0, 1.3, 1.6])
    return [max(1, min(ranks * limit, int(generator.lognormvariate(centre, spread)))) for _ in range(samples)]


def seconds_of(plan, pack, cost):
    """The time of a pack by the cost model's definition: shared by its ranks, and a cut costs each of them."""
    lengths = [plan.lengths[s] for s in pack.samples]
    work = sum(cost.linear * n + cost.attention * n**2 for n in lengths)
    return work / pack.cp_size + len(lengths) * cost.hop * (pack.cp_size - 1)


def makespan(plan, cost):
    """When the last rank is done, if each pack starts as soon as all its ranks are free, in the plan's order."""
    free = [0.0] * plan.ranks
    for microbatch in plan.microbatches:
        for pack in microbatch:
            ranks = range(pack.first_rank, pack.first_rank + pack.cp_size)
            done = max(free[rank] for rank in ranks) + seconds_of(plan, pack, cost)
            for rank in ranks:
                free[rank] = done
    return max(free)


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


def in_two_processes(program, *arguments):
    """The words that a program prints last, in two new processes with different hash seeds."""
    running = [
        subprocess.Popen(
            [sys.executable, "-c", program, *arguments],
            env=os.environ | {"PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "2")
    ]
    answers = [process.communicate() for process in running]
    for process, (_, error) in zip(running, answers, strict=True):
        assert process.returncode == 0, error
    return [out.splitlines()[-1].split() for out, _ in answers]
