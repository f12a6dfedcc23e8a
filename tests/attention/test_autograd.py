"""What autograd may ask of attention, for every scheme: several losses, layers and packs, views, parts of gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_dcp.attention import context_parallel_attention
from lightning_dcp.attention.options import AttentionOptions
from lightning_dcp.attention.sdpa import ContextParallelAttention
from lightning_dcp.parallel.clock import WaitClock
from lightning_dcp.parallel.context import CPContext, make_context
from lightning_dcp.parallel.groups import CPGroup
from tests.attention.dense import KINDS, Inputs, dense_attention, make_inputs, make_sinks, plain_attention
from tests.attention.support import (
    SCHEMES,
    Case,
    assert_as_dense,
    attend,
    join_shares,
    local_leaves,
    played_contexts,
    share_of,
)
from tests.parallel.support import join_world, own_context, sample_slices
from tests.support.ranks import RankPool

PACK = Inputs((13, 7, 64))
Job = Callable[..., Any]


def on_played_ranks(inputs: Inputs, size: int, job: Callable[[CPContext], Any]) -> list[Any]:
    """A job on each rank of a played group."""
    played, context = played_contexts(Case(inputs, size))
    return played.run(lambda exchange: job(context(exchange)))


def share(context: CPContext, out: Tensor, leaves: Sequence[Tensor]) -> dict[str, Any]:
    return share_of(context, out, [t.grad for t in leaves])


def two_losses_on_one_output(context: CPContext, scheme: str) -> dict[str, Any]:
    leaves, grad = local_leaves(PACK, context)
    out = context_parallel_attention(*leaves, context, scheme=scheme)
    (out * (grad - 2)).sum().backward(retain_graph=True)
    (2 * out).sum().backward()
    return share(context, out, leaves)


def one_output_used_twice(context: CPContext, scheme: str) -> dict[str, Any]:
    leaves, grad = local_leaves(PACK, context)
    out = context_parallel_attention(*leaves, context, scheme=scheme)
    ((out * (grad - 2)).sum() + (out + out).sum()).backward()
    return share(context, out, leaves)


def the_same_backward_twice(context: CPContext, scheme: str) -> dict[str, Any]:
    leaves, grad = local_leaves(PACK, context)
    out = context_parallel_attention(*leaves, context, scheme=scheme)
    first = torch.autograd.grad(out, leaves, grad, retain_graph=True)
    second = torch.autograd.grad(out, leaves, grad)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    return share_of(context, out, second)


@pytest.mark.parametrize("job", [two_losses_on_one_output, one_output_used_twice, the_same_backward_twice])
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_several_losses_on_one_output_add_up(scheme: str, size: int, job: Job) -> None:
    shares = on_played_ranks(PACK, size, lambda context: job(context, scheme))
    assert_as_dense(Case(PACK, size), join_shares(PACK, shares))


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_gradient_of_gradients_is_refused(scheme: str, size: int) -> None:
    def job(context: CPContext) -> None:
        leaves, _ = local_leaves(PACK, context)
        out = context_parallel_attention(*leaves, context, scheme=scheme)
        (dq,) = torch.autograd.grad(out.square().sum(), leaves[:1], create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            dq.sum().backward()

    on_played_ranks(PACK, size, job)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_one_context_serves_several_layers(scheme: str, size: int) -> None:
    def stacked(context: CPContext) -> dict[str, Any]:
        leaves, grad = local_leaves(PACK, context)
        first = context_parallel_attention(*leaves, context, scheme=scheme)
        context_parallel_attention(first, *leaves[1:], context, scheme=scheme).backward(grad)
        return share(context, first, leaves)

    got = join_shares(PACK, on_played_ranks(PACK, size, stacked))
    for where in sample_slices(PACK.lengths):
        q, k, v, grad = (t[where].clone() for t in make_inputs(PACK))
        leaves = [t.requires_grad_() for t in (q, k, v)]
        plain_attention(plain_attention(*leaves), k, v).backward(grad)
        for name, leaf in zip(("dq", "dk", "dv"), leaves, strict=True):
            np.testing.assert_allclose(got.arrays[name][where], leaf.grad.numpy(), rtol=0, atol=1e-10)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["first in, first out", "last in, first out"])
@pytest.mark.parametrize("schemes", [(a, b) for a in SCHEMES for b in SCHEMES], ids="-".join)
def test_two_packs_are_under_way_at_once(schemes: tuple[str, str], order: tuple[int, int]) -> None:
    packs = Inputs((13, 7)), Inputs((3, 64, 2), kv_heads=1)

    def job(context: CPContext) -> list[dict[str, Any]]:
        other = make_context(context.group, context.rank, packs[1].lengths, exchange=context.exchange)
        contexts = context, other
        pairs = [local_leaves(inputs, own) for inputs, own in zip(packs, contexts, strict=True)]
        outs = [
            context_parallel_attention(*leaves, own, scheme=scheme)
            for (leaves, _), own, scheme in zip(pairs, contexts, schemes, strict=True)
        ]
        for i in order:
            outs[i].backward(pairs[i][1])
        return [share(own, out, leaves) for own, out, (leaves, _) in zip(contexts, outs, pairs, strict=True)]

    shares = on_played_ranks(packs[0], 3, job)
    for i, inputs in enumerate(packs):
        assert_as_dense(Case(inputs, 3), join_shares(inputs, [both[i] for both in shares]))


def _packs_under_way_together(first: Inputs, second: Inputs) -> list[list[dict[str, Any]]]:
    """Forward of one pack, forward of another on smaller groups, then both backwards, in both orders."""
    groups = join_world()
    results = []
    for scheme in SCHEMES:
        for order in ((0, 1), (1, 0)):
            contexts = [own_context(groups, first.lengths, 4), own_context(groups, second.lengths, 2)]
            pairs = [local_leaves(pack, own) for pack, own in zip((first, second), contexts, strict=True)]
            outs = [
                context_parallel_attention(*leaves, own, scheme=scheme)
                for (leaves, _), own in zip(pairs, contexts, strict=True)
            ]
            for i in order:
                outs[i].backward(pairs[i][1])
            results.append([share(c, out, leaves) for c, out, (leaves, _) in zip(contexts, outs, pairs, strict=True)])
    return results


def test_the_backward_of_a_pack_after_the_forward_of_another_on_other_groups(ranks: RankPool) -> None:
    first, second = Inputs((13, 7)), Inputs((3, 64, 2), kv_heads=1)
    by_rank = ranks.run(_packs_under_way_together, 4, first, second)
    assert len(by_rank[0]) == 2 * len(SCHEMES)
    for shares in zip(*by_rank, strict=True):
        assert_as_dense(Case(first, 4), join_shares(first, [both[0] for both in shares]))
        for pair in (shares[:2], shares[2:]):  # both groups of two have the same pack
            assert_as_dense(Case(second, 2), join_shares(second, [both[1] for both in pair]))


WANTED = {"q": (0,), "k": (1,), "v": (2,), "sinks": (3,), "q and v": (0, 2)}


@pytest.mark.parametrize("wanted", WANTED)
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_gradients_of_only_some_inputs(scheme: str, size: int, wanted: str) -> None:
    case = Case(PACK, size, scheme=scheme, kind=KINDS["sinks"])

    def job(context: CPContext) -> dict[str, Any]:
        *parts, grad = (t[context.pack_index] for t in make_inputs(PACK))
        tensors = [*parts, make_sinks(PACK)]
        for i in WANTED[wanted]:
            tensors[i].requires_grad_()
        kind = case.kind.attention_kind(PACK, tensors[3])
        out = context_parallel_attention(*tensors[:3], context, kind, scheme=scheme)
        out.backward(grad)
        assert [i for i, t in enumerate(tensors) if t.grad is not None] == list(WANTED[wanted])
        own = {("dq", "dk", "dv", "dsinks")[i]: tensors[i].grad.numpy() for i in WANTED[wanted]}
        return {"index": context.pack_index.numpy(), "arrays": own, "dtypes": set()}

    got, expected = join_shares(PACK, on_played_ranks(PACK, size, job)), dense_attention(PACK, case.kind)
    for name, array in got.arrays.items():
        np.testing.assert_allclose(array, expected[name], rtol=0, atol=1e-10)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_without_gradients_nothing_is_kept(scheme: str) -> None:
    def job(context: CPContext) -> None:
        leaves, _ = local_leaves(PACK, context)
        with torch.no_grad():
            out = context_parallel_attention(*leaves, context, scheme=scheme)
        assert out.grad_fn is None and not out.requires_grad

    on_played_ranks(PACK, 2, job)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_autocast_computes_in_bfloat16_and_gives_gradients_of_the_inputs_dtype(scheme: str, size: int) -> None:
    inputs = Inputs((13, 7, 64), dtype=torch.float32)

    def job(context: CPContext) -> dict[str, Any]:
        leaves, grad = local_leaves(inputs, context)
        with torch.autocast("cpu", torch.bfloat16), ContextParallelAttention(context, AttentionOptions(scheme)):
            q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in leaves)
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
        assert out.dtype == torch.bfloat16
        out.backward(grad.to(torch.bfloat16))
        assert all(t.grad.dtype == torch.float32 for t in leaves)
        return share(context, out, leaves)

    got, expected = join_shares(inputs, on_played_ranks(inputs, size, job)), dense_attention(inputs)
    for name, array in expected.items():
        scale = max(1.0, np.abs(array).max())
        assert 0 < np.abs(got.arrays[name] - array).max() < 4 * torch.finfo(torch.bfloat16).eps * scale, name


def _waiting_time(inputs: Inputs) -> dict[str, tuple[float, float]]:
    groups, seconds = join_world(), {}
    for scheme in SCHEMES:
        clocks = WaitClock(), WaitClock()
        for size, clock in zip((1, 2), clocks, strict=True):
            place = groups.rank % size
            group = groups.cp_group(groups.rank - place, size)
            own = make_context(group, place, inputs.lengths, clock=clock)
            attend(Case(inputs, size, scheme=scheme), own)
        seconds[scheme] = clocks[0].seconds, clocks[1].seconds
    return seconds


def test_only_a_rank_with_others_waits(ranks: RankPool) -> None:
    for seconds in ranks.run(_waiting_time, 2, Inputs((13, 7))):
        for alone, together in seconds.values():
            assert alone == 0
            assert together > 0


@pytest.mark.parametrize(
    ("kernel", "kind"), [("reference", "soft-cap"), ("reference", "sinks"), ("cpu_flash", "sinks")]
)
def test_under_autocast_what_was_made_float32_stays_so(kernel: str, kind: str) -> None:
    inputs = Inputs((64, 13), dtype=torch.bfloat16)
    case = Case(inputs, 1, kernel=kernel, kind=KINDS[kind])
    context = make_context(CPGroup(None, (0,)), 0, inputs.lengths)
    plain = attend(case, context)["arrays"]
    with torch.autocast("cpu", torch.bfloat16):
        inside = attend(case, context)["arrays"]
    for name, array in plain.items():
        np.testing.assert_array_equal(inside[name], array)
