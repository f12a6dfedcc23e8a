"""Attention over budgeted shards, in every order of the ring, is what zigzag gives: output and all gradients."""

from dataclasses import dataclass, replace
from itertools import permutations

import numpy as np
import pytest

from lightning_dcp.boundaries.budget import BoundaryBudget
from lightning_dcp.boundaries.budgeted import budgeted
from lightning_dcp.parallel.layout import zigzag
from tests.attention.dense import Inputs
from tests.attention.support import Case, assert_as_dense, attend_on, attend_played, rounds_off_rank_0
from tests.boundaries.support import COST, chat

TURNS = ("user", 7, 1.0), ("tool", 9, 3.0), ("tool", 4, 3.0), ("assistant", 11, 1.0)
CHATS = [chat(*TURNS), chat(("user", 3, 1.0)), chat(*TURNS, *TURNS[1:]), chat(("tool", 25, 2.0), ("user", 2, 1.0))]
LENGTHS, SEGMENTS = tuple(length for length, _ in CHATS), [own for _, own in CHATS]


@dataclass(frozen=True)
class Budgeted(Case):
    """A case whose layout is made from the segments."""

    def pack_layout(self):
        total = sum(LENGTHS)
        return budgeted(LENGTHS, self.size, SEGMENTS, BoundaryBudget(total // self.size + 6, 26), COST)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("scheme", ["ring", "all_gather"])
def test_budgeted_layouts_in_every_order_give_what_zigzag_gives(size, scheme):
    case = Budgeted(Inputs(LENGTHS), size, scheme=scheme)
    assert case.pack_layout() != zigzag(LENGTHS, size)
    plain = attend_played(Case(case.inputs, size, scheme=scheme)).arrays
    for ring in permutations(range(size)) if scheme == "ring" else [None]:
        got = attend_played(replace(case, ring=ring))
        assert_as_dense(case, got)
        assert all(np.abs(got.arrays[name] - plain[name]).max() <= 1e-10 for name in plain)


def test_budgeted_layouts_on_ranks_give_dense_attention(ranks):
    cases = [Budgeted(Inputs(LENGTHS), 2), Budgeted(Inputs(LENGTHS), 2, ring=(1, 0))]
    done = list(attend_on(ranks, 4, rounds_off_rank_0(cases, 4)))
    assert len(done) == 2
    for case, got in done:
        assert_as_dense(case, got)
