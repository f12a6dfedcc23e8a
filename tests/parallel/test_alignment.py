"""Samples with padding inside regions: where it lies, and that nothing outside and no attention sees it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_dcp.attention.functional import serve_attention
from lightning_dcp.attention.options import AttentionOptions
from lightning_dcp.attention.transformer_engine import te_arguments
from lightning_dcp.errors import PlanError
from lightning_dcp.models.megatron.te_attention import packed_of
from lightning_dcp.parallel.context import CPContext, make_context, region_tokens
from lightning_dcp.parallel.groups import CPGroup
from lightning_dcp.parallel.layout import PackLayout, build_layout
from lightning_dcp.parallel.shard import gather, shard
from lightning_dcp.schedule import Alignment
from tests.parallel.support import join_world
from tests.support.ranks import RankPool

ALIGNMENTS = st.builds(Alignment, st.integers(1, 5), st.integers(0, 3), st.integers(1, 6))
PACKS = st.lists(st.integers(1, 40), min_size=1, max_size=6)
LENGTHS = (7, 1, 12, 5)
ALIGNMENT = Alignment(sample=3, cut=2, rank=4)


def contexts(lengths: list[int] | tuple[int, ...], size: int, **options: object) -> list[CPContext]:
    group = CPGroup(None, tuple(range(size)))
    return [make_context(group, rank, lengths, exchange=object(), **options) for rank in range(size)]  # type: ignore[arg-type]


# ------------------------------------------------------------------ where padding lies


def test_padding_lies_behind_each_sample() -> None:
    """Samples of 3 and 2 tokens, each with padding to 4, on one rank."""
    (context,) = contexts([3, 2], 1, alignment=Alignment(sample=4))
    assert context.is_real.tolist() == [True, True, True, False, True, True, False, False]
    assert context.region_index.tolist() == [0, 1, 2, 4, 5]
    assert context.pack_index.tolist() == [0, 1, 2, 3, 4]
    assert (context.num_local_tokens, context.num_region_tokens, context.num_fill_tokens) == (5, 8, 3)


def test_padding_takes_part_in_the_cut() -> None:
    """Samples of 7 and 1 token on two ranks, in 4 equal chunks each: rank r holds chunks r and 3 - r."""
    first, second = contexts([7, 1], 2, alignment=Alignment.transformer_engine())
    assert (first.pack_index.tolist(), second.pack_index.tolist()) == ([0, 1, 6, 7], [2, 3, 4, 5])
    assert first.is_real.tolist() == [True, True, True, False, True, False]  # 0 1 6 . | 0 .
    assert second.is_real.tolist() == [True, True, True, True, False, False]  # 2 3 4 5 | . .
    assert first.with_padding.layout.lengths == (8, 4)
    assert first.with_padding.positions.tolist() == [[0, 1, 6, 7, 0, 3]]


@given(PACKS, st.integers(1, 6), ALIGNMENTS, st.integers(1, 3), st.sampled_from(["zigzag", "contiguous"]))
def test_regions_see_multiples_and_each_token_once(
    lengths: list[int], size: int, alignment: Alignment, multiple: int, name: str
) -> None:
    ranks = contexts(lengths, size, alignment=alignment, token_multiple=multiple, layout=name)
    padded = alignment.padded_lengths(lengths, size)
    whole = build_layout(name, padded, size)
    assert sorted(i for context in ranks for i in context.pack_index.tolist()) == list(range(sum(lengths)))
    assert region_tokens(name, lengths, size, token_multiple=multiple, alignment=alignment) == ranks[0].region_tokens
    for rank, context in enumerate(ranks):
        context.layout.validate()
        assert context.with_padding.layout == whole
        assert context.num_region_tokens % multiple == context.num_region_tokens % alignment.rank == 0
        assert context.num_region_tokens == len(context.is_real) >= whole.tokens(rank)
        assert context.is_real.nonzero().flatten().tolist() == context.region_index.tolist()
        samples = [c.sample for c in whole.ranks[rank] for _ in range(len(c))]
        real = [n < lengths[s] for s, n in zip(samples, whole.positions(rank).tolist(), strict=True)]
        assert context.is_real.tolist() == real + [False] * (context.num_region_tokens - len(real))


@given(PACKS, st.integers(1, 4), ALIGNMENTS)
def test_fill_tokens_come_and_go_and_get_no_gradient(lengths: list[int], size: int, alignment: Alignment) -> None:
    for context in contexts(lengths, size, alignment=alignment):
        local = torch.arange(2.0 * context.num_local_tokens, dtype=torch.float64).view(-1, 2).requires_grad_()
        inside = context.with_fill(local, torch.tensor([-7.0, -8.0], dtype=torch.float64))
        assert torch.equal(context.without_fill(inside), local)
        assert (inside[~context.is_real] == torch.tensor([-7.0, -8.0])).all()
        (inside**2).sum().backward()
        assert local.grad is not None and torch.equal(local.grad, 2 * local.detach())


def test_a_layout_of_ones_own_goes_without_padding() -> None:
    layout = PackLayout.from_chunks((4,), [[(0, 0, 4)]])
    with pytest.raises(PlanError, match="told by its name"):
        contexts([4], 1, layout=layout, alignment=Alignment(sample=8))
    with pytest.raises(PlanError, match="without padding"):
        layout.without_padding((5,))


# ------------------------------------------------------------------ what sees it


def test_transformer_engine_is_told_of_padding_where_attention_is_not_causal() -> None:
    (_, context) = contexts([7, 1, 13], 2, alignment=Alignment.transformer_engine())
    causal, other = packed_of(context, causal=True), packed_of(context, causal=False)
    padded, real = [0, 8, 12, 28], [0, 7, 8, 21]
    assert causal.cu_seqlens_q.tolist() == causal.cu_seqlens_q_padded.tolist() == padded
    assert (other.cu_seqlens_q.tolist(), other.cu_seqlens_kv_padded.tolist()) == (real, padded)
    assert causal.max_seqlen_q == other.max_seqlen_kv == 16
    assert te_arguments(context.with_padding)["cu_seqlens_q"].tolist() == padded


KINDS: dict[str, dict[str, object]] = {
    "causal": {"is_causal": True},
    "both sides": {"is_causal": False},
    "window": {"is_causal": True, "window_size": (2, 0)},
    "by sample": {"is_causal": (True, False, True, False)},
}


def attended(context: CPContext, kind: str) -> dict[str, Tensor]:
    """Outputs and gradients of attention over whole tensors, cut and gathered as a region does."""
    generator = torch.Generator().manual_seed(3)
    draws = [torch.randn(sum(LENGTHS), 2, 4, generator=generator, dtype=torch.float64) for _ in range(4)]
    leaves, weights = [draw.requires_grad_() for draw in draws[:3]], draws[3]
    rows = [context.with_fill(shard(leaf, context), leaf[0]).transpose(0, 1).unsqueeze(0) for leaf in leaves]
    given = {"window_size": None, "scale": None, "softcap": None, "sinks": None, "dropout_p": 0.0} | KINDS[kind]
    out = serve_attention(context, AttentionOptions(), *rows, **given)
    whole = gather(context.without_fill(out[0].transpose(0, 1)), context)
    (whole * weights).sum().backward()
    return {"out": whole.detach(), "q": leaves[0].grad, "k": leaves[1].grad, "v": leaves[2].grad}  # type: ignore[dict-item]


def attention_job() -> dict[tuple[int, str], dict[str, Tensor]]:
    groups, found = join_world(), {}
    for size in (1, 2, 4):
        place = groups.rank % size
        group = groups.cp_group(groups.rank - place, size)
        context = make_context(group, place, LENGTHS, alignment=ALIGNMENT, token_multiple=2)
        found |= {(size, kind): attended(context, kind) for kind in KINDS}
    return found


def test_attention_does_not_see_padding(ranks: RankPool) -> None:
    plain = {kind: attended(make_context(CPGroup(None, (0,)), 0, LENGTHS), kind) for kind in KINDS}
    for own in ranks.run(attention_job, 4):
        for (size, kind), values in own.items():
            for name, right in plain[kind].items():
                torch.testing.assert_close(
                    values[name], right, rtol=1e-12, atol=1e-12, msg=f"{name}, {kind}, CP {size}"
                )
