"""Blocks cover what a mask lets tokens see inside each sample, once, and nothing else."""

from __future__ import annotations

from itertools import chain, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_dcp.parallel.blocks import AttentionBlocks, AttentionMask, BlockKind, attention_blocks
from lightning_dcp.parallel.context import make_context
from lightning_dcp.parallel.groups import CPGroup
from lightning_dcp.parallel.layout import LAYOUTS, PackLayout, build_layout
from tests.parallel.support import any_layouts, sample_slices

CPU = torch.device("cpu")
CAUSAL = AttentionMask()
NAMED = st.builds(
    build_layout,
    st.sampled_from(sorted(LAYOUTS)),
    st.lists(st.integers(1, 40), min_size=1, max_size=5),
    st.integers(1, 8),
)
ANY = st.one_of(NAMED, any_layouts())
WINDOWS = st.tuples(st.integers(-1, 9), st.integers(-1, 9))


@st.composite
def masked_layouts(draw: st.DrawFn) -> tuple[PackLayout, AttentionMask]:
    layout = draw(ANY)
    each = st.lists(st.booleans(), min_size=len(layout.lengths), max_size=len(layout.lengths)).map(tuple)
    return layout, AttentionMask(draw(st.one_of(st.booleans(), each)), draw(WINDOWS))


Hop = tuple[int | None, int | None, tuple[AttentionBlocks, ...]]


def all_hops(layout: PackLayout, mask: AttentionMask = CAUSAL) -> list[Hop]:
    ranks = range(layout.size)
    return [(q, k, attention_blocks(layout, q, k, mask, CPU)) for q in ranks for k in ranks]


def index_of(layout: PackLayout, rank: int | None) -> np.ndarray:
    return np.arange(layout.num_tokens) if rank is None else layout.pack_index(rank).numpy()


def how_often_computed(layout: PackLayout, hops: list[Hop]) -> np.ndarray:
    """For each (query, key) of the pack: how many blocks hold it."""
    counts = np.zeros((layout.num_tokens, layout.num_tokens), dtype=int)
    shapes = {BlockKind.FULL: lambda pairs: pairs, BlockKind.LOWER: np.tril, BlockKind.UPPER: np.triu}
    for q_rank, k_rank, groups in hops:
        for group in groups:
            for block in group.blocks:
                rows = index_of(layout, q_rank)[block.queries]
                columns = index_of(layout, k_rank)[block.keys]
                assert group.kind is BlockKind.FULL or len(rows) == len(columns)
                counts[np.ix_(rows, columns)] += shapes[group.kind](np.ones((len(rows), len(columns)), dtype=int))
    return counts


def visible(layout: PackLayout, mask: AttentionMask) -> np.ndarray:
    """By the definition, sample by sample."""
    wanted = np.zeros((layout.num_tokens, layout.num_tokens), dtype=int)
    left, right = mask.window_size
    for sample, where in enumerate(sample_slices(layout.lengths)):
        at = np.arange(where.stop - where.start)
        back = at[:, None] - at[None, :]  # how far a key lies before the query
        seen = np.ones_like(back, dtype=bool)
        if mask.causal if isinstance(mask.causal, bool) else mask.causal[sample]:
            seen &= back >= 0
        if left >= 0:
            seen &= back <= left
        if right >= 0:
            seen &= -back <= right
        wanted[where, where] = seen
    return wanted


@given(masked_layouts())
def test_every_visible_pair_of_each_sample_is_computed_once_and_no_other(
    case: tuple[PackLayout, AttentionMask],
) -> None:
    layout, mask = case
    wanted = visible(layout, mask)
    assert np.array_equal(how_often_computed(layout, all_hops(layout, mask)), wanted)


@given(masked_layouts())
def test_the_whole_pack_as_keys_or_as_both_gives_the_same_pairs(case: tuple[PackLayout, AttentionMask]) -> None:
    layout, mask = case
    gathered = [(q, None, attention_blocks(layout, q, None, mask, CPU)) for q in range(layout.size)]
    whole = [(None, None, attention_blocks(layout, None, None, mask, CPU))]
    for hops in (gathered, whole):
        assert np.array_equal(how_often_computed(layout, hops), visible(layout, mask))


@given(masked_layouts())
def test_blocks_of_a_kind_ascend_are_not_empty_and_lie_in_one_sample(case: tuple[PackLayout, AttentionMask]) -> None:
    layout, mask = case
    sample_of = np.repeat(np.arange(len(layout.lengths)), layout.lengths)
    for q_rank, k_rank, groups in all_hops(layout, mask):
        assert len({group.kind for group in groups}) == len(groups)
        for group in groups:
            assert group.blocks
            for before, after in pairwise(group.blocks):
                assert before.q_end <= after.q_start
            for block in group.blocks:
                assert block.q_start < block.q_end and block.k_start < block.k_end
                tokens = [*index_of(layout, q_rank)[block.queries], *index_of(layout, k_rank)[block.keys]]
                assert len(set(sample_of[tokens])) == 1


LONG = st.integers(1, 6).flatmap(
    lambda size: st.builds(
        build_layout,
        st.sampled_from(sorted(LAYOUTS)),
        st.lists(st.integers(4 * size, 60), min_size=1, max_size=5),
        st.just(size),
    )
)
"""Samples whose chunks are of two tokens at least."""


@given(LONG)
def test_causal_text_in_a_named_layout_is_one_kind_a_hop_and_one_block_a_sample(layout: PackLayout) -> None:
    sample_of = np.repeat(np.arange(len(layout.lengths)), layout.lengths)
    for q_rank, k_rank, groups in all_hops(layout):
        assert {group.kind for group in groups} <= {BlockKind.LOWER if q_rank == k_rank else BlockKind.FULL}
        for group in groups:
            samples = [sample_of[index_of(layout, q_rank)[block.q_start]] for block in group.blocks]
            assert len(set(samples)) == len(samples)


@given(NAMED)
def test_whole_samples_need_one_block_each(layout: PackLayout) -> None:
    (causal,) = attention_blocks(layout, None, None, CAUSAL, CPU)
    (full,) = attention_blocks(layout, None, None, AttentionMask(causal=False), CPU)
    alone = max(layout.lengths) == 1  # a token that sees itself is a full block as well
    assert (causal.kind, full.kind) == (BlockKind.FULL if alone else BlockKind.LOWER, BlockKind.FULL)
    for group in (causal, full):
        assert [(b.q_start, b.q_end) for b in group.blocks] == [(b.k_start, b.k_end) for b in group.blocks]
        assert [b.q_end - b.q_start for b in group.blocks] == list(layout.lengths)


@given(st.integers(1, 300), st.integers(1, 40))
def test_a_sliding_window_needs_few_blocks_and_none_wider_than_itself(tokens: int, window: int) -> None:
    layout = build_layout("zigzag", [tokens], 1)
    groups = attention_blocks(layout, 0, 0, AttentionMask(window_size=(window - 1, 0)), CPU)
    blocks = [block for group in groups for block in group.blocks]
    assert all(block.k_end - block.k_start <= window for block in blocks)
    assert len(blocks) <= 3 * (-(-tokens // window) + 1)


@given(masked_layouts())
def test_index_tensors_list_the_blocks_tokens_upper_triangles_backwards(case: tuple[PackLayout, AttentionMask]) -> None:
    for _, _, groups in all_hops(*case):
        for group in groups:
            step = -1 if group.kind is BlockKind.UPPER else 1
            queries = [list(range(b.q_start, b.q_end))[::step] for b in group.blocks]
            keys = [list(range(b.k_start, b.k_end))[::step] for b in group.blocks]
            for lists, index, cumulative, longest in (
                (queries, group.q_index, group.cu_seqlens_q, group.max_seqlen_q),
                (keys, group.k_index, group.cu_seqlens_k, group.max_seqlen_k),
            ):
                assert index.tolist() == list(chain.from_iterable(lists))
                assert cumulative.dtype == torch.int32
                assert cumulative.tolist() == [0, *np.cumsum([len(part) for part in lists])]
                assert longest == max(len(part) for part in lists)


def test_zigzag_blocks_of_two_ranks() -> None:
    layout = build_layout("zigzag", [8], 2)  # rank 0 holds 0, 1, 6, 7; rank 1 holds 2, 3, 4, 5
    found = {
        (q, k): [(b.q_start, b.q_end, b.k_start, b.k_end) for group in groups for b in group.blocks]
        for q, k, groups in all_hops(layout)
    }
    assert found == {(0, 0): [(0, 4, 0, 4)], (1, 1): [(0, 4, 0, 4)], (0, 1): [(2, 4, 0, 4)], (1, 0): [(0, 4, 0, 2)]}


def test_a_rank_that_comes_before_all_keys_has_no_block() -> None:
    layout = build_layout("contiguous", [8], 2)
    assert attention_blocks(layout, 0, 1, CAUSAL, CPU) == ()


@pytest.mark.parametrize("mask", [CAUSAL, AttentionMask(causal=False), AttentionMask(window_size=(2, 0))])
def test_a_context_works_out_each_hop_and_mask_once(mask: AttentionMask) -> None:
    context = make_context(CPGroup(None, (2, 3)), 1, [8])
    assert context.blocks(1, 0, mask) is context.blocks(1, 0, mask)
    same = AttentionMask(mask.causal, mask.window_size)
    assert context.blocks(1, 0, same) is context.blocks(1, 0, mask)
    assert context.blocks(1, 1, mask) is not context.blocks(1, 0, mask)


def test_lists_as_configurations_have_them_make_the_same_mask() -> None:
    assert AttentionMask([True, False], [3, 0]) == AttentionMask((True, False), (3, 0))  # type: ignore[arg-type]
