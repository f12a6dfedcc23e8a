"""Random plans, batches, cost models and schedulers."""

import math
import os
import random
import subprocess
import sys

from hypothesis import strategies as st

from lightning_dcp.schedule import CostModel, DynamicScheduler, Pack, StepPlan, preset
from tests.schedule.oracles import sizes_of, walk  # noqa: F401  (walk is imported from here)

PLANES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


@st.composite
def plans(draw, mode=None, longest=9):
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
    lengths = draw(st.lists(st.integers(1, longest), min_size=samples, max_size=samples))
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


def speeds_of(ranks):
    return st.lists(st.floats(0.25, 2), min_size=ranks, max_size=ranks).map(tuple)


@st.composite
def batches(draw, planes=PLANES):
    """A plane, a limit a rank, and lengths that fit: many short samples, some of any length."""
    ranks = draw(st.sampled_from(planes))
    limit = draw(st.sampled_from([1, 3, 16, 1000, 8192]))
    short = st.integers(1, min(limit, 60))
    lengths = draw(st.lists(st.one_of(short, st.integers(1, ranks * limit)), min_size=1, max_size=40))
    return ranks, limit, lengths


def about(low, high):
    """Numbers of any magnitude between two, and 0."""
    return st.one_of(st.just(0.0), st.floats(math.log(low), math.log(high)).map(math.exp))


@st.composite
def efficiencies(draw):
    points = draw(st.lists(st.integers(1, 20_000), min_size=1, max_size=5, unique=True))
    return tuple((tokens, draw(st.floats(0.05, 1))) for tokens in sorted(points))


@st.composite
def cost_models(draw):
    """Any valid cost model whose hops between nodes, where they differ, are no faster than those inside."""
    linear, attention = draw(about(1e-8, 1e-3)), draw(about(1e-13, 1e-6))
    latency, hop_bytes, bandwidth = draw(about(1e-6, 0.1)), draw(about(1.0, 1e6)), draw(st.floats(1e6, 1e12))
    return CostModel(
        linear=linear if linear + attention else 1e-5,
        attention=attention,
        efficiency=draw(efficiencies()),
        pack_overhead=draw(about(1e-5, 1.0)),
        hop_latency=latency,
        hop_bytes=hop_bytes,
        bandwidth=bandwidth if hop_bytes else draw(st.sampled_from([None, bandwidth])),
        internode_latency=draw(st.one_of(st.none(), about(1e-6, 0.1).map(lambda more: latency + more))),
        internode_bandwidth=draw(st.one_of(st.none(), st.floats(1, 100).map(lambda times: bandwidth / times))),
        overlap=draw(st.one_of(st.just(0.0), st.just(1.0), st.floats(0, 1))),
        ranks_per_node=draw(st.one_of(st.none(), st.integers(1, 16))),
    )


@st.composite
def schedulers(draw, planes=range(1, 65), most=40, **fixed):
    """A dynamic scheduler with any options, and lengths that fit on its largest groups."""
    ranks = draw(st.sampled_from(planes))
    mode = draw(st.sampled_from(["free", "lockstep"]))
    limits = sorted(draw(st.lists(st.sampled_from(sizes_of(ranks)), min_size=2, max_size=2)))
    options = {
        "max_seqlen_per_dp_cp_rank": draw(st.sampled_from([1, 3, 16, 1000, 8192])),
        "cost": draw(st.one_of(st.sampled_from([preset("h100"), preset("cpu")]), cost_models())),
        "layout": draw(st.sampled_from(["zigzag", "contiguous"])),
        "mode": mode,
        "microbatch_multiple": draw(st.sampled_from([1, 1, 2, 3, 4])) if mode == "lockstep" else 1,
        "ranks_per_node": draw(st.one_of(st.none(), st.integers(1, 2 * ranks))),
        "rank_speeds": draw(st.one_of(st.none(), speeds_of(ranks))),
    }
    if draw(st.booleans()):
        options |= {"min_context_parallel_size": limits[0], "max_context_parallel_size": limits[1]}
    scheduler = DynamicScheduler(ranks, **options | fixed)
    limit = scheduler.max_seqlen_per_dp_cp_rank
    short = st.integers(1, min(limit, 60))
    any_length = st.integers(1, scheduler.sizes[-1] * limit)
    return scheduler, draw(st.lists(st.one_of(short, any_length), min_size=1, max_size=most))


def limited_sizes(scheduler):
    """The divisors of the plane between a scheduler's smallest and largest size."""
    largest = scheduler.max_context_parallel_size or scheduler.ranks
    return [c for c in sizes_of(scheduler.ranks) if scheduler.min_context_parallel_size <= c <= largest]


def lognormal_lengths(seed, count, centre, spread, longest):
    """Lengths as text corpora have them: mostly short, with a heavy tail."""
    generator = random.Random(seed)
    return [max(1, min(longest, int(generator.lognormvariate(centre, spread)))) for _ in range(count)]


ONLY_PLANNING = """
import importlib.util, sys, types
package = types.ModuleType("lightning_dcp")
package.__path__ = list(importlib.util.find_spec("lightning_dcp").submodule_search_locations)
sys.modules["lightning_dcp"] = package
"""
"""Planning needs nothing but ``lightning_dcp.schedule``; importing all of the package takes seconds."""


def in_two_processes(program, *arguments):
    """The words that a program about plans prints last, in two new processes with different hash seeds."""
    running = [
        subprocess.Popen(
            [sys.executable, "-c", ONLY_PLANNING + program, *arguments],
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
