"""Which tokens each rank holds."""

from __future__ import annotations

from itertools import chain, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_dcp.errors import PlanError
from lightning_dcp.parallel.context import make_context
from lightning_dcp.parallel.groups import CPGroup
from lightning_dcp.parallel.layout import LAYOUTS, Chunk, PackLayout, build_layout, rank_shares
from tests.parallel.support import any_layouts

PACKS = st.lists(st.integers(1, 70), min_size=1, max_size=12)
SIZES = st.integers(1, 9)
NAMES = st.sampled_from(sorted(LAYOUTS))


def indices(layout: PackLayout) -> list[list[int]]:
    return [layout.pack_index(rank).tolist() for rank in range(layout.size)]


def positions(layout: PackLayout) -> list[list[int]]:
    return [layout.positions(rank).tolist() for rank in range(layout.size)]


def causal_pairs(layout: PackLayout, rank: int) -> int:
    """Pairs of a query of this rank and a key that it sees."""
    return int((layout.positions(rank) + 1).sum())


@given(NAMES, PACKS, SIZES)
def test_every_token_lies_on_one_rank(name: str, lengths: list[int], size: int) -> None:
    layout = build_layout(name, lengths, size)
    layout.validate()
    assert sorted(chain.from_iterable(indices(layout))) == list(range(sum(lengths)))
    assert [layout.tokens(rank) for rank in range(size)] == [len(index) for index in indices(layout)]


@given(NAMES, PACKS, SIZES)
def test_no_rank_holds_more_than_its_share_of_the_pack_or_of_a_sample(name: str, lengths: list[int], size: int) -> None:
    layout = build_layout(name, lengths, size)
    held = [layout.tokens(rank) for rank in range(size)]
    assert max(held) <= -(-sum(lengths) // size)
    assert max(held) - min(held) <= 1
    for sample, length in enumerate(lengths):
        shares = [sum(len(c) for c in chunks if c.sample == sample) for chunks in layout.ranks]
        assert max(shares) <= -(-length // size)
        assert shares == rank_shares(lengths, size)[sample]


@given(NAMES, PACKS, SIZES)
def test_chunks_ascend_are_not_empty_and_do_not_touch(name: str, lengths: list[int], size: int) -> None:
    for chunks in build_layout(name, lengths, size).ranks:
        for before, after in pairwise(chunks):
            assert (before.sample, before.end) < (after.sample, after.start)
        assert all(len(chunk) for chunk in chunks)


@given(any_layouts())
def test_index_and_positions_are_of_the_same_tokens(layout: PackLayout) -> None:
    starts = [sum(layout.lengths[:sample]) for sample in range(len(layout.lengths))]
    for rank, chunks in enumerate(layout.ranks):
        samples = [c.sample for c in chunks for _ in range(len(c))]
        expected = [starts[s] + p for s, p in zip(samples, positions(layout)[rank], strict=True)]
        assert indices(layout)[rank] == expected


@pytest.mark.parametrize(
    ("name", "lengths", "expected"),
    [
        ("zigzag", [8], [[0, 1, 6, 7], [2, 3, 4, 5]]),
        ("zigzag", [4, 4], [[0, 3, 4, 7], [1, 2, 5, 6]]),
        ("contiguous", [8], [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("contiguous", [4, 4], [[0, 1, 4, 5], [2, 3, 6, 7]]),
        ("zigzag", [1, 1], [[0], [1]]),
        ("zigzag", [1], [[0], []]),
    ],
)
def test_tokens_of_two_ranks(name: str, lengths: list[int], expected: list[list[int]]) -> None:
    assert indices(build_layout(name, lengths, 2)) == expected


def test_positions_start_anew_with_each_sample_and_belong_to_the_layout_not_to_the_packs_before() -> None:
    assert positions(build_layout("zigzag", [4, 4], 2)) == [[0, 3, 0, 3], [1, 2, 1, 2]]
    assert positions(build_layout("zigzag", [4, 4], 1)) == [[0, 1, 2, 3, 0, 1, 2, 3]]
    assert positions(build_layout("zigzag", [4, 4], 2)) == [[0, 3, 0, 3], [1, 2, 1, 2]]


def test_a_context_gives_positions_and_indices_of_its_rank() -> None:
    pair, alone = CPGroup(None, (4, 5)), CPGroup(None, (5,))
    context = make_context(pair, 1, [4, 4])
    assert context.positions.tolist() == [[1, 2, 1, 2]]
    assert context.pack_index.tolist() == [1, 2, 5, 6]
    assert context.gather_index.tolist() == [0, 3, 4, 7, 1, 2, 5, 6]
    assert context.num_local_tokens == 4
    after = make_context(alone, 0, [4, 4])
    assert after.positions.tolist() == [[0, 1, 2, 3, 0, 1, 2, 3]]
    assert after.positions.dtype == after.pack_index.dtype == torch.int64


@given(st.lists(st.integers(40, 400), min_size=1, max_size=4), st.sampled_from([2, 3, 4, 8]))
def test_zigzag_balances_causal_work(lengths: list[int], size: int) -> None:
    layout = build_layout("zigzag", lengths, size)
    work = [causal_pairs(layout, rank) for rank in range(size)]
    # Shares differ by one token of a sample at most, and chunks of a rank by one more.
    assert max(work) - min(work) <= sum(2 * length for length in lengths)


CHUNK_ERRORS = {
    "a token that no rank holds": ((8,), ((Chunk(0, 0, 3),), (Chunk(0, 4, 8),)), r"sample\(s\) \[0\]"),
    "a token on two ranks": ((2, 8), ((Chunk(0, 0, 2), Chunk(1, 0, 5)), (Chunk(1, 4, 8),)), r"sample\(s\) \[1\]"),
    "a token twice on one rank": ((8,), ((Chunk(0, 0, 5), Chunk(0, 4, 8)),), r"sample\(s\) \[0\]"),
    "a sample that no rank holds": ((3, 3), ((Chunk(0, 0, 3),),), r"sample\(s\) \[1\]"),
    "chunks that descend": ((8,), ((Chunk(0, 4, 8), Chunk(0, 0, 4)),), "chunks of rank 0 must ascend"),
    "samples that descend": ((3, 3), ((), (Chunk(1, 0, 3), Chunk(0, 0, 3))), "chunks of rank 1 must ascend"),
    "a sample that is none": ((8,), ((Chunk(0, 0, 8), Chunk(1, 0, 2)),), "is no part of a sample"),
    "a negative sample": ((8,), ((Chunk(-1, 0, 8),),), "is no part of a sample"),
    "a chunk past the end": ((8,), ((Chunk(0, 0, 9),),), "is no part of a sample"),
    "a chunk before the start": ((8,), ((Chunk(0, -1, 8),),), "is no part of a sample"),
    "an empty chunk": ((8,), ((Chunk(0, 0, 8),), (Chunk(0, 4, 4),)), "rank 1: .* is no part of a sample"),
}


@pytest.mark.parametrize("fault", CHUNK_ERRORS)
def test_validate_names_what_is_wrong(fault: str) -> None:
    lengths, ranks, message = CHUNK_ERRORS[fault]
    with pytest.raises(PlanError, match=message):
        PackLayout(lengths, ranks).validate()


def test_an_unknown_layout_is_refused_with_those_there_are() -> None:
    with pytest.raises(PlanError, match=r"unknown layout 'diagonal'; there are \['budgeted', 'contiguous', 'zigzag'\]"):
        build_layout("diagonal", [8], 2)


def test_chunks_in_any_order_make_a_layout_and_neighbours_are_joined() -> None:
    layout = PackLayout.from_chunks([5, 3], [[(1, 0, 1), (0, 2, 3), (0, 0, 2)], [(1, 1, 3), (0, 3, 5)]])
    assert layout.ranks == ((Chunk(0, 0, 3), Chunk(1, 0, 1)), (Chunk(0, 3, 5), Chunk(1, 1, 3)))


@pytest.mark.parametrize("ranks", [[[(0, 0, 3)], [(0, 2, 5)]], [[(0, 0, 3)], []], [[(0, 0, 6)], []], [[(1, 0, 5)], []]])
def test_chunks_that_do_not_hold_each_token_once_are_refused(ranks: list[list[tuple[int, int, int]]]) -> None:
    with pytest.raises(PlanError):
        PackLayout.from_chunks([5], ranks)


WRONG = {
    "of other samples": lambda lengths, size: build_layout("zigzag", [*lengths, 1], size),
    "for other ranks": lambda lengths, size: build_layout("zigzag", lengths, size + 1),
    "with a token twice": lambda lengths, size: PackLayout(tuple(lengths), ((Chunk(0, 0, lengths[0]),),) * size),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_layout_of_ones_own_is_checked(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setitem(LAYOUTS, "own", WRONG[name])
    with pytest.raises(PlanError):
        build_layout("own", [6], 2)


@pytest.mark.parametrize(("lengths", "size"), [((9,), 2), ((8,), 3), ((8, 1), 2), ((), 2)])
def test_a_layout_for_another_pack_is_refused(lengths: tuple[int, ...], size: int) -> None:
    layout = PackLayout((), ((), ())) if not lengths else build_layout("zigzag", [8], 2)
    with pytest.raises(PlanError):
        make_context(CPGroup(None, tuple(range(size))), 0, lengths, layout=layout)
