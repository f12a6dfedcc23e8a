"""Ring attention is dense attention of each sample alone, at every size, layout and kernel."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from lightning_dcp.attention import ring_attention
from lightning_dcp.parallel.context import CPContext
from tests.attention.support import (
    KERNELS,
    Case,
    Inputs,
    Round,
    assert_as_dense,
    attend,
    attend_on,
    join_shares,
    make_inputs,
    plain_attention,
    share_of,
)
from tests.parallel.support import join_world, own_context, sample_slices
from tests.support.ranks import RankPool

LENGTHS = (1, 2, 3, 7, 13, 64, 257)
LAYOUTS = ("zigzag", "contiguous", "random")


def pack_of(samples: int) -> tuple[int, ...]:
    """Lengths of a pack; short samples are as frequent as long ones."""
    draw = random.Random(samples)
    return tuple(draw.choice(LENGTHS) for _ in range(samples)) if samples > 1 else (257,)


PACKS = {n: pack_of(n) for n in (1, 2, 5, 40)}


def grid(size: int) -> list[Case]:
    """All packs, numbers of heads and layouts; the kernel changes so that it meets each value of each of them."""
    cases = []
    for (i, lengths), (j, kv_heads), (k, layout) in product(
        enumerate(PACKS.values()), enumerate((4, 2, 1)), enumerate(LAYOUTS)
    ):
        inputs = Inputs(lengths, kv_heads, source=("mlp", "gaussian")[(i + j) % 2])
        cases.append(Case(inputs, size, layout, kernel=list(KERNELS)[(i + j + k) % 3]))
    return cases


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 8])
def test_outputs_and_gradients_of_each_sample_are_those_of_dense_attention(ranks: RankPool, size: int) -> None:
    rounds: list[Round] = [{0: case} for case in grid(size)]
    for case, got in attend_on(ranks, size, rounds):
        assert_as_dense(case, got)


def test_the_packs_hold_every_length() -> None:
    assert set().union(*PACKS.values()) == set(LENGTHS)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_group_that_does_not_start_at_rank_0_works_beside_others_and_beside_idle_ranks(
    ranks: RankPool, layout: str
) -> None:
    long, short = Inputs((13, 64, 7)), Inputs((3, 64), kv_heads=1)
    # The idle ranks come first: the first transfers after set-up must not need them.
    four = [{2: Case(long, 2, layout)}, {0: Case(short, 2, layout), 2: Case(long, 2, layout)}]
    six = [{3: Case(long, 3, layout)}, {0: Case(short, 2, layout), 3: Case(long, 3, layout)}]
    six.append({0: Case(long, 3, layout), 3: Case(short, 3, layout)})
    for world, rounds in ((4, four), (6, six)):
        for case, got in attend_on(ranks, world, rounds):
            assert_as_dense(case, got)


def test_a_hundred_rounds_that_alternate_between_group_sizes(ranks: RankPool) -> None:
    pair, other, all_four = Inputs((13, 7)), Inputs((3, 13), kv_heads=4), Inputs((7, 13, 2), kv_heads=1)
    rounds = [{0: Case(pair, 2), 2: Case(other, 2)}, {0: Case(all_four, 4)}] * 50
    checked = 0
    for case, got in attend_on(ranks, 4, rounds):
        assert_as_dense(case, got)
        checked += 1
    assert checked == 150


@pytest.mark.parametrize("kernel", KERNELS)
def test_samples_shorter_than_the_group_and_ranks_without_tokens(ranks: RankPool, kernel: str) -> None:
    packs = [(1,), (2,), (3,), (1, 2, 3), (1, 1), (3, 1, 1, 2)]
    rounds: list[Round] = [
        {0: Case(Inputs(lengths), 4, layout, kernel)} for lengths in packs for layout in ("zigzag", "contiguous")
    ]
    for case, got in attend_on(ranks, 4, rounds):
        assert_as_dense(case, got)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("size", [1, 2])
def test_heads_first_views_give_the_same_as_contiguous_tensors(ranks: RankPool, size: int, kernel: str) -> None:
    inputs = Inputs((13, 64, 7))
    rounds: list[Round] = [{0: Case(inputs, size, kernel=kernel, transposed=view)} for view in (False, True)]
    (_, expected), (_, got) = attend_on(ranks, size, rounds)
    for name, array in expected.arrays.items():
        np.testing.assert_allclose(got.arrays[name], array, rtol=0, atol=1e-13)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_scale_of_ones_own(ranks: RankPool, kernel: str) -> None:
    rounds: list[Round] = [{0: Case(Inputs((13, 64)), 2, kernel=kernel, scale=0.9)}]
    for case, got in attend_on(ranks, 2, rounds):
        assert_as_dense(case, got)
        with pytest.raises(AssertionError, match="out of sample 0 is off"):
            assert_as_dense(replace(case, scale=None), got)


def _leaves(inputs: Inputs, context: CPContext) -> tuple[list[Tensor], Tensor]:
    """q, k and v of this rank, to differentiate, and the gradient of the output."""
    *parts, grad = (t[context.pack_index] for t in make_inputs(inputs))
    return [part.requires_grad_() for part in parts], grad


def _share(context: CPContext, out: Tensor, leaves: Sequence[Tensor]) -> dict[str, Any]:
    return share_of(context, out, [t.grad for t in leaves])


def _two_losses_on_one_output(inputs: Inputs) -> dict[str, Any]:
    context = own_context(join_world(), inputs.lengths, 2)
    leaves, grad = _leaves(inputs, context)
    out = ring_attention(*leaves, context)
    (out * (grad - 2)).sum().backward(retain_graph=True)
    (2 * out).sum().backward()
    return _share(context, out, leaves)


def _one_output_used_twice(inputs: Inputs) -> dict[str, Any]:
    context = own_context(join_world(), inputs.lengths, 2)
    leaves, grad = _leaves(inputs, context)
    out = ring_attention(*leaves, context)
    ((out * (grad - 2)).sum() + (out + out).sum()).backward()
    return _share(context, out, leaves)


@pytest.mark.parametrize("job", [_two_losses_on_one_output, _one_output_used_twice])
def test_several_losses_on_one_output_add_up(ranks: RankPool, job: Callable[..., dict[str, Any]]) -> None:
    case = Case(Inputs((13, 7, 64)), 2)
    assert_as_dense(case, join_shares(case, ranks.run(job, 2, case.inputs)))


def _stacked(inputs: Inputs) -> dict[str, Any]:
    """Two calls on one context, one on the result of the other."""
    context = own_context(join_world(), inputs.lengths, 2)
    leaves, grad = _leaves(inputs, context)
    out = ring_attention(ring_attention(*leaves, context), *leaves[1:], context)
    out.backward(grad)
    return _share(context, out, leaves)


def test_one_context_serves_several_layers(ranks: RankPool) -> None:
    case = Case(Inputs((13, 7, 64)), 2)
    got = join_shares(case, ranks.run(_stacked, 2, case.inputs))
    for where in sample_slices(case.inputs.lengths):
        q, k, v, grad = (t[where].clone() for t in make_inputs(case.inputs))
        leaves = [t.requires_grad_() for t in (q, k, v)]
        out = plain_attention(plain_attention(*leaves), k, v)
        out.backward(grad)
        for name, tensor in zip(got.arrays, (out.detach(), *(t.grad for t in leaves)), strict=True):
            np.testing.assert_allclose(got.arrays[name][where], tensor.numpy(), rtol=0, atol=1e-10)


def _packs_under_way_together(first: Case, second: Case, order: str) -> list[dict[str, Any]]:
    """Forward of one pack, forward of another on other groups, then both backwards, in one order or the other."""
    groups = join_world()
    contexts = [own_context(groups, case.inputs.lengths, case.size) for case in (first, second)]
    pairs = [_leaves(case.inputs, context) for case, context in zip((first, second), contexts, strict=True)]
    outs = [ring_attention(*leaves, context) for (leaves, _), context in zip(pairs, contexts, strict=True)]
    for i in (0, 1) if order == "first in, first out" else (1, 0):
        outs[i].backward(pairs[i][1])
    return [_share(c, out, leaves) for c, out, (leaves, _) in zip(contexts, outs, pairs, strict=True)]


@pytest.mark.parametrize("order", ["first in, first out", "last in, first out"])
def test_the_backward_of_a_pack_after_the_forward_of_another(ranks: RankPool, order: str) -> None:
    first, second = Case(Inputs((13, 7)), 4), Case(Inputs((3, 64, 2), kv_heads=1), 2)
    shares = ranks.run(_packs_under_way_together, 4, first, second, order)
    assert_as_dense(first, join_shares(first, [share[0] for share in shares]))
    for pair in (shares[:2], shares[2:]):  # both groups of two have the same pack
        assert_as_dense(second, join_shares(second, [share[1] for share in pair]))


def _waiting_time(inputs: Inputs) -> tuple[float, float]:
    groups = join_world()
    contexts = [own_context(groups, inputs.lengths, size) for size in (1, 2)]
    for context in contexts:
        attend(Case(inputs, context.size), context)
    return contexts[0].clock.seconds, contexts[1].clock.seconds


def test_only_a_ring_waits(ranks: RankPool) -> None:
    for alone, together in ranks.run(_waiting_time, 2, Inputs((13, 7))):
        assert alone == 0
        assert together > 0
