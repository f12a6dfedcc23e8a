"""Attention over a CP group under ``torch.compile``: the same results, and graphs that fit every pack."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.utils import counters
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_dcp.attention import attention
from lightning_dcp.attention.sdpa import ContextParallelAttention
from lightning_dcp.models.decoder import Decoder, rotary_tables
from lightning_dcp.parallel.context import CPContext, make_context
from lightning_dcp.parallel.groups import CPGroup
from tests.parallel.support import join_world, own_context
from tests.support.ranks import RankPool

VOCAB = 11
# Lengths of the samples of each pack, and its CP size.
PACKS = [((5, 3), 1), ((16, 7), 2), ((9,), 1), ((20, 1, 2), 2), ((1,), 1), ((4, 4, 4, 4), 2)]
PACKS += [((n, 3, n // 2), 1 + n % 2) for n in (6, 11, 12, 17, 30, 31)]


class CheckpointedDecoder(Decoder):
    """A decoder that runs its blocks again in the backward."""

    use_reentrant = False

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        cos, sin = rotary_tables(position_ids, self.head_dim, self.rope_base, x.dtype)
        for block in self.blocks:
            x = checkpoint(block, x, cos, sin, use_reentrant=self.use_reentrant)
        return self.head(self.norm(x))


class ReentrantDecoder(CheckpointedDecoder):
    use_reentrant = True


def decoder(kind: type[Decoder] = Decoder) -> Decoder:
    torch.manual_seed(0)
    return kind(VOCAB, hidden_size=16, num_layers=2, num_heads=2, ffn_hidden_size=24).double()


def _whole(model: Decoder, backend: str) -> nn.Module:
    return torch.compile(model, backend=backend)


def _in_place(model: Decoder, backend: str) -> nn.Module:
    model.compile(backend=backend)
    return model


def _blocks(model: Decoder, backend: str) -> nn.Module:
    for block in model.blocks:
        block.compile(backend=backend)
    return model


WAYS: dict[str, Callable[[Decoder, str], nn.Module]] = {"whole": _whole, "in place": _in_place, "blocks": _blocks}


def run_pack(model: nn.Module, context: CPContext) -> tuple[list[Tensor], tuple[int, int]]:
    """Output and gradients of a pack on this rank, and how many attention calls forward and backward served."""
    torch.manual_seed(context.layout.num_tokens)
    ids = torch.randint(VOCAB, (1, context.layout.num_tokens))[:, context.pack_index]
    model.zero_grad()
    with ContextParallelAttention(context) as forward:
        out = model(ids, context.positions)
    with ContextParallelAttention(context) as backward:
        out.square().sum().backward()
    return [out.detach(), *(p.grad.clone() for p in model.parameters())], (forward.calls, backward.calls)


def _packs(way: str, backend: str, kind: type[Decoder] = Decoder) -> dict[str, Any]:
    """All packs, compiled and not: how far they are apart, calls served, and graphs so far after each pack."""
    torch._dynamo.reset()
    counters.clear()
    groups = join_world()
    compiled, plain = WAYS[way](decoder(kind), backend), decoder(kind)
    errors, calls, graphs = [], set(), []
    for lengths, size in PACKS:
        ours, served = run_pack(compiled, own_context(groups, lengths, size))
        theirs, expected = run_pack(plain, own_context(groups, lengths, size))
        errors.append(max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True)))
        calls |= {served, expected}
        graphs.append(counters["stats"]["unique_graphs"])
    alone = len(_debug_get_cache_entry_list(ContextParallelAttention.__torch_function__.__code__))
    return {"errors": errors, "calls": calls, "graphs": graphs, "alone": alone, "frames": dict(counters["frames"])}


@pytest.mark.parametrize("way", WAYS)
def test_packs_of_any_shape_have_the_same_gradients_and_share_graphs(ranks: RankPool, way: str) -> None:
    for result in ranks.run(_packs, 2, way, "aot_eager" if way == "whole" else "eager"):
        assert max(result["errors"]) < 1e-10
        assert result["calls"] == {(2, 0)}
        assert 0 < result["graphs"][0] < result["graphs"][5] == result["graphs"][-1] < 30
        assert result["alone"] == 0


@pytest.mark.parametrize("kind", [CheckpointedDecoder, ReentrantDecoder])
@pytest.mark.parametrize("way", [pytest.param("whole", marks=pytest.mark.slow), "blocks"])
def test_checkpointed_layers_are_served_again_in_the_backward(
    ranks: RankPool, way: str, kind: type[CheckpointedDecoder]
) -> None:
    for result in ranks.run(_packs, 2, way, "eager", kind):
        assert max(result["errors"]) < 1e-10
        assert result["calls"] == {(2, 2)}
        assert 0 < result["graphs"][5] == result["graphs"][-1] < 30


# --- what is refused, or not touched, is the same as without compiling


def _attend(q: Tensor, **options: Any) -> Tensor:
    return F.scaled_dot_product_attention(q, q, q, **({"is_causal": True} | options))


def _capped(q: Tensor) -> Tensor:
    return attention(q, q, q, softcap=2.0)


class _Custom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor) -> Tensor:
        return _attend(q)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


_mha = nn.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64)

FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "attention": lambda q: _attend(q + 1) * 2,
    "attention twice": lambda q: _attend(_attend(q) + 1),
    "attention in a loop": lambda q: sum(_attend(q * i) for i in range(3)),
    "attention in a custom function": lambda q: _Custom.apply(q * 1) * 2,
    "attention in a checkpoint": lambda q: checkpoint(_attend, q * 1, use_reentrant=True) * 2,
    "attention that is not causal": lambda q: _attend(q * 1, is_causal=False) * 2,
    "attention with a window": lambda q: attention(q + 1, q, q, window_size=(2, 0)) * 2,
    "attention with a cap in a checkpoint": lambda q: checkpoint(_capped, q * 1, use_reentrant=False) * 2,
    "dropout": lambda q: _attend(q * 1, dropout_p=0.1),
    "mask": lambda q: _attend(q, attn_mask=torch.ones(8, 8, dtype=torch.bool)),
    "torch's layer": lambda q: _mha(q[0], q[0], q[0], need_weights=False)[0],
    "softmax method": lambda q: (q @ q.mT).softmax(-1) @ q,
    "softmax function": lambda q: F.softmax(q @ q.mT, -1) @ q,
    "softmax by keyword": lambda q: torch.softmax(input=q @ q.mT, dim=-1) @ q,
    "softmax over experts": lambda q: q[..., :5].softmax(-1) * 2,
    "cumsum": lambda q: torch.cumsum(q * 1, 2) * 2,
    "roll": lambda q: (q * 1).roll(1, 2) * 2,
    "convolution": lambda q: F.conv1d(q[0], q.new_ones(2, 2, 3)) * 2,
    "unflatten": lambda q: q.flatten(1).unflatten(1, (2, 8, 8)) + 1,
    "unflatten by keyword": lambda q: q.flatten(1).unflatten(dim=1, sizes=(2, 8, 8)) + 1,
}


def _outcome(function: Callable[[Tensor], Any]) -> Any:
    context = make_context(CPGroup(None, (0,)), 0, (5, 3))
    torch.manual_seed(0)
    q = torch.randn(1, 2, 8, 8, dtype=torch.float64, requires_grad=True)
    try:
        with ContextParallelAttention(context) as mode:
            out = function(q)
        with ContextParallelAttention(context):
            out.sum().backward()
    except Exception as error:
        return type(error).__name__, str(error)
    return mode.calls, out.tolist(), q.grad.tolist()


def _both(name: str) -> tuple[Any, Any]:
    torch._dynamo.reset()
    return _outcome(FUNCTIONS[name]), _outcome(torch.compile(FUNCTIONS[name], backend="eager"))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_do_the_same_compiled(ranks: RankPool, name: str) -> None:
    eager, compiled = ranks.run(_both, 1, name)[0]
    assert compiled == eager
    served = isinstance(eager[0], int)
    kept = ("attention", "unflatten", "softmax over")
    assert served == name.startswith(kept) and (served or eager[0] == "UnsupportedAttentionError")
    assert name.startswith("attention") == (served and eager[0] > 0)


def _inside_and_outside() -> list[Any]:
    """A compiled function, in turns outside and inside the mode, with a mode of torch's own around."""
    torch._dynamo.reset()
    context = make_context(CPGroup(None, (0,)), 0, (5, 3))
    compiled, q = torch.compile(_attend, backend="eager"), torch.randn(1, 2, 8, 8)
    inside = partial(_inside, context)
    found = [compiled(q), inside(compiled, q), compiled(q), inside(compiled, q)]
    with torch.device("cpu"):
        found += [compiled(q), inside(compiled, q)]
    expected = [_attend(q), inside(_attend, q)] * 3
    return [torch.equal(a, b) for a, b in zip(found, expected, strict=True)] + [not torch.equal(*expected[:2])]


def _inside(context: CPContext, function: Callable[[Tensor], Tensor], q: Tensor) -> Tensor:
    with ContextParallelAttention(context):
        return function(q)


def test_graphs_from_outside_the_mode_are_not_used_inside(ranks: RankPool) -> None:
    assert all(ranks.run(_inside_and_outside, 1)[0])
