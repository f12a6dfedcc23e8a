"""Layers that activation checkpointing runs again in the backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_dcp.attention.options import AttentionOptions
from lightning_dcp.attention.sdpa import ContextParallelAttention
from lightning_dcp.parallel.context import CPContext
from tests.attention.support import SCHEMES
from tests.parallel.support import join_world, own_context, sample_slices
from tests.support.ranks import RankPool

LENGTHS = (9, 4, 17)
WIDTH, HEADS = 8, 2


class Layer(nn.Module):
    """Self-attention as models write it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3 * HEADS, -1)).transpose(0, 1).chunk(3)
        y = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)
        return x + self.out(y[0].transpose(0, 1).flatten(1))


def layers_and_tokens() -> tuple[nn.ModuleList, Tensor]:
    torch.manual_seed(0)
    return nn.ModuleList([Layer().double(), Layer().double()]), torch.randn(sum(LENGTHS), WIDTH, dtype=torch.float64)


def run_layers(layers: nn.ModuleList, x: Tensor, use_reentrant: bool | None) -> Tensor:
    for layer in layers:
        x = layer(x) if use_reentrant is None else checkpoint(layer, x, use_reentrant=use_reentrant)
    return x.square().sum()


def gradients(layers: nn.ModuleList, tokens: Tensor) -> dict[str, Tensor]:
    return {"tokens": tokens.grad} | {name: p.grad for name, p in layers.named_parameters()}


BACKWARDS: dict[str, Callable[[Tensor], None]] = {
    "tensor": lambda loss: loss.backward(),
    "autograd": torch.autograd.backward,
    "weighted": lambda loss: (3 * loss).backward(torch.tensor(1 / 3, dtype=loss.dtype)),
}
"""Ways to begin a backward; the first is the usual one."""


def _run_schemes(*arguments: Any) -> list[dict[str, Any]]:
    context = own_context(join_world(), LENGTHS, 2)
    return [_run(context, AttentionOptions(scheme), *arguments) for scheme in SCHEMES]


def _run(
    context: CPContext,
    options: AttentionOptions,
    use_reentrant: bool | None,
    backward: str = "tensor",
    mode_in_backward: bool = True,
) -> dict[str, Any]:
    layers, tokens = layers_and_tokens()
    local = tokens[context.pack_index].requires_grad_()
    with ContextParallelAttention(context, options) as forward_mode:
        loss = run_layers(layers, local, use_reentrant)
    backward_mode = ContextParallelAttention(context, options)
    with backward_mode if mode_in_backward else nullcontext():
        BACKWARDS[backward](loss)
    grads = {name: grad.numpy() for name, grad in gradients(layers, local).items()}
    return {"index": context.pack_index, "grads": grads, "calls": (forward_mode.calls, backward_mode.calls)}


def one_process() -> dict[str, Tensor]:
    layers, tokens = layers_and_tokens()
    tokens.requires_grad_()
    for where in sample_slices(LENGTHS):
        run_layers(layers, tokens[where], None).backward()
    return gradients(layers, tokens)


def joined(shares: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """Gradients of the ranks together: sums of the parameters', and the tokens' put in the pack's order."""
    together = {n: sum(torch.from_numpy(s["grads"][n]) for s in shares) for n in shares[0]["grads"] if n != "tokens"}
    tokens = torch.empty(sum(LENGTHS), WIDTH, dtype=torch.float64)
    for share in shares:
        tokens[share["index"]] = torch.from_numpy(share["grads"]["tokens"])
    return together | {"tokens": tokens}


@pytest.mark.parametrize("backward", BACKWARDS)
@pytest.mark.parametrize("use_reentrant", [None, True, False], ids=["none", "reentrant", "non-reentrant"])
def test_gradients_with_and_without_checkpointing_are_those_of_one_process(
    ranks: RankPool, use_reentrant: bool | None, backward: str
) -> None:
    by_rank = ranks.run(_run_schemes, 2, use_reentrant, backward)
    again = 0 if use_reentrant is None else 2
    assert len(by_rank[0]) == len(SCHEMES)
    for shares in zip(*by_rank, strict=True):
        expected, got = one_process(), joined(shares)
        assert got.keys() == expected.keys()
        for name, grad in expected.items():
            torch.testing.assert_close(got[name], grad, rtol=0, atol=1e-10, msg=name)
        assert all(share["calls"] == (2, again) for share in shares)


def test_a_checkpointed_backward_outside_the_mode_is_not_the_same(ranks: RankPool) -> None:
    for shares in zip(*ranks.run(_run_schemes, 2, True, "tensor", False), strict=True):
        assert not torch.allclose(joined(shares)["tokens"], one_process()["tokens"])
