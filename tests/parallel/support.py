"""Ranks that join a world, and layouts of every kind."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence

import torch.distributed as dist
from hypothesis import strategies as st

from lightning_dcp.parallel.context import CPContext, make_context
from lightning_dcp.parallel.groups import ParallelGroups, initialize_groups
from lightning_dcp.parallel.layout import Chunk, PackLayout
from lightning_dcp.parallel.topology import Topology


def join_world(tensor_parallel: int = 1) -> ParallelGroups:
    """Meet the other ranks of a job and make all groups."""
    world = int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=world)
    return initialize_groups(Topology(world, tensor_model_parallel_size=tensor_parallel))


def own_context(
    groups: ParallelGroups, lengths: Sequence[int], size: int, layout: str | PackLayout = "zigzag"
) -> CPContext:
    """A pack on this rank's group of a size."""
    place = groups.rank % size
    return make_context(groups.cp_group(groups.rank - place, size), place, lengths, layout=layout)


def layout_of_pieces(size: int, pieces: Sequence[Sequence[tuple[int, int]]]) -> PackLayout:
    """A layout from the pieces of each sample, ascending: ``(end, owner)``."""
    ranks: list[list[Chunk]] = [[] for _ in range(size)]
    for sample, cut in enumerate(pieces):
        start = 0
        for end, owner in cut:
            ranks[owner].append(Chunk(sample, start, end))
            start = end
    layout = PackLayout(tuple(cut[-1][0] for cut in pieces), tuple(tuple(chunks) for chunks in ranks))
    layout.validate()
    return layout


def random_layout(lengths: Sequence[int], size: int, seed: int) -> PackLayout:
    """Samples cut at random places, each piece on a random rank; from three ranks on, one has nothing."""
    draw = random.Random(seed)
    owners = draw.sample(range(size), size - 1 if size > 2 else size)
    pieces = []
    for length in lengths:
        ends = sorted(draw.sample(range(1, length), min(length - 1, draw.randint(0, 2 * size))))
        pieces.append([(end, draw.choice(owners)) for end in [*ends, length]])
    return layout_of_pieces(size, pieces)


@st.composite
def any_layouts(draw: st.DrawFn) -> PackLayout:
    """Any valid layout of a few short samples; pieces of one rank may touch, and ranks may be empty."""
    size = draw(st.integers(1, 6))
    pieces = []
    for length in draw(st.lists(st.integers(1, 14), min_size=1, max_size=5)):
        inner = draw(st.sets(st.integers(1, length - 1), max_size=6)) if length > 1 else set()
        pieces.append([(end, draw(st.integers(0, size - 1))) for end in [*sorted(inner), length]])
    return layout_of_pieces(size, pieces)


def sample_slices(lengths: Sequence[int]) -> list[slice]:
    """Where each sample lies in its pack."""
    slices, start = [], 0
    for length in lengths:
        slices.append(slice(start, start + length))
        start += length
    return slices
