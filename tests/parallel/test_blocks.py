"""Dense blocks cover causal attention inside each sample, and nothing else."""

from __future__ import annotations

from itertools import chain, pairwise

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_dcp.parallel.blocks import AttentionBlocks, attention_blocks
from lightning_dcp.parallel.context import make_context
from lightning_dcp.parallel.groups import CPGroup
from lightning_dcp.parallel.layout import LAYOUTS, PackLayout, build_layout
from tests.parallel.support import any_layouts, sample_slices

CPU = torch.device("cpu")
NAMED = st.builds(
    build_layout,
    st.sampled_from(sorted(LAYOUTS)),
    st.lists(st.integers(1, 40), min_size=1, max_size=5),
    st.integers(1, 8),
)


def all_hops(layout: PackLayout) -> list[tuple[int, int, AttentionBlocks]]:
    ranks = range(layout.size)
    return [(q, k, attention_blocks(layout, q, k, CPU)) for q in ranks for k in ranks]


def how_often_computed(layout: PackLayout) -> np.ndarray:
    """For each (query, key) of the pack: how many blocks hold it."""
    index = [layout.pack_index(rank).numpy() for rank in range(layout.size)]
    counts = np.zeros((layout.num_tokens, layout.num_tokens), dtype=int)
    for q_rank, k_rank, hop in all_hops(layout):
        for block in hop.blocks:
            rows, columns = index[q_rank][block.queries], index[k_rank][block.keys]
            pairs = np.ones((len(rows), len(columns)), dtype=int)
            counts[np.ix_(rows, columns)] += np.tril(pairs) if hop.causal else pairs
    return counts


def causal_in_samples(layout: PackLayout) -> np.ndarray:
    wanted = np.zeros((layout.num_tokens, layout.num_tokens), dtype=int)
    for where in sample_slices(layout.lengths):
        wanted[where, where] = np.tril(np.ones((where.stop - where.start,) * 2, dtype=int))
    return wanted


@given(st.one_of(NAMED, any_layouts()))
def test_every_causal_pair_of_each_sample_is_computed_once_and_no_other(layout: PackLayout) -> None:
    assert np.array_equal(how_often_computed(layout), causal_in_samples(layout))


@given(st.one_of(NAMED, any_layouts()))
def test_no_block_is_empty_and_each_lies_in_one_sample(layout: PackLayout) -> None:
    sample_of = np.repeat(np.arange(len(layout.lengths)), layout.lengths)
    index = [layout.pack_index(rank).numpy() for rank in range(layout.size)]
    for q_rank, k_rank, hop in all_hops(layout):
        assert hop.causal == (q_rank == k_rank)
        for block in hop.blocks:
            assert block.q_start < block.q_end and block.k_start < block.k_end
            tokens = [*index[q_rank][block.queries], *index[k_rank][block.keys]]
            assert len(set(sample_of[tokens])) == 1


@given(st.one_of(NAMED, any_layouts()))
def test_a_query_is_in_one_block_of_a_hop_at_most(layout: PackLayout) -> None:
    for _, _, hop in all_hops(layout):
        for before, after in pairwise(hop.blocks):
            assert before.q_end <= after.q_start


@given(NAMED)
def test_the_named_layouts_need_one_block_a_sample_and_hop_at_most(layout: PackLayout) -> None:
    sample_of = np.repeat(np.arange(len(layout.lengths)), layout.lengths)
    for q_rank, _, hop in all_hops(layout):
        index = layout.pack_index(q_rank).numpy()
        samples = [sample_of[index[block.q_start]] for block in hop.blocks]
        assert len(set(samples)) == len(samples)


@given(st.one_of(NAMED, any_layouts()))
def test_index_tensors_list_the_blocks_tokens(layout: PackLayout) -> None:
    for _, _, hop in all_hops(layout):
        if not hop.blocks:
            continue
        queries = [list(range(b.q_start, b.q_end)) for b in hop.blocks]
        keys = [list(range(b.k_start, b.k_end)) for b in hop.blocks]
        for lists, index, cumulative, longest in (
            (queries, hop.q_index, hop.cu_seqlens_q, hop.max_seqlen_q),
            (keys, hop.k_index, hop.cu_seqlens_k, hop.max_seqlen_k),
        ):
            assert index.tolist() == list(chain.from_iterable(lists))
            assert cumulative.dtype == torch.int32
            assert cumulative.tolist() == [0, *np.cumsum([len(part) for part in lists])]
            assert longest == max(len(part) for part in lists)


def test_zigzag_blocks_of_two_ranks() -> None:
    layout = build_layout("zigzag", [8], 2)  # rank 0 holds 0, 1, 6, 7; rank 1 holds 2, 3, 4, 5
    found = {(q, k): [(b.q_start, b.q_end, b.k_start, b.k_end) for b in hop.blocks] for q, k, hop in all_hops(layout)}
    assert found == {(0, 0): [(0, 4, 0, 4)], (1, 1): [(0, 4, 0, 4)], (0, 1): [(2, 4, 0, 4)], (1, 0): [(0, 4, 0, 2)]}


def test_a_context_works_out_each_hop_once() -> None:
    context = make_context(CPGroup(None, (2, 3)), 1, [8])
    assert context.blocks_to(0) is context.blocks_to(0)
    assert not context.blocks_to(0).causal
    assert context.blocks_to(1).causal
