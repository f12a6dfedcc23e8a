"""Sharding and gathering: nothing gets lost, and gradients add up over the group."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_dcp.parallel.layout import PackLayout
from lightning_dcp.parallel.shard import gather, shard
from tests.parallel.support import join_world, own_context, random_layout
from tests.support.ranks import RankPool

LENGTHS = (3, 5, 1, 11)
TOKENS = sum(LENGTHS)


def fields() -> dict[str, Tensor]:
    """Per-token fields of several kinds; each tells its token."""
    index = torch.arange(TOKENS)
    return {
        "int64": index,
        "int32": index.int(),
        "bool": index % 3 == 0,
        "float32": torch.stack([index, 10 * index, -index], 1).float(),
        "float64": torch.randn(TOKENS, 2, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64),
        "bfloat16": (index / 64).bfloat16(),
    }


def layouts(lengths: tuple[int, ...], size: int) -> list[str | PackLayout]:
    return ["zigzag", "contiguous", random_layout(lengths, size, seed=3)]


def _there_and_back(size: int) -> None:
    groups = join_world()
    for layout in layouts(LENGTHS, size):
        context = own_context(groups, LENGTHS, size, layout)
        for name, field in fields().items():
            local = shard(field, context)
            assert torch.equal(local, field[context.pack_index]), name
            whole = gather(local, context)
            assert whole.dtype == field.dtype
            assert torch.equal(whole, field), name
        assert shard(fields()["int64"], context).tolist() == context.pack_index.tolist()


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_field_is_the_same_after_shard_and_gather(ranks: RankPool, size: int) -> None:
    ranks.run(_there_and_back, size, size)


def _on_the_second_pair() -> list[list[int]]:
    groups = join_world()
    context = own_context(groups, (3, 5), 2)
    tokens = torch.arange(8) + 100 * (groups.rank // 2)  # the pairs have packs of their own
    views = torch.stack([tokens, -tokens], 1)[:, 0]
    return [shard(tokens, context).tolist(), gather(shard(views, context), context).tolist()]


def test_groups_side_by_side_keep_their_own_tokens(ranks: RankPool) -> None:
    found = ranks.run(_on_the_second_pair, 4)
    assert [whole for _, whole in found] == [list(range(8))] * 2 + [list(range(100, 108))] * 2
    assert found[3][0] == [100 + token for token in found[1][0]]


def _fewer_tokens_than_ranks() -> list[list[int]]:
    context = own_context(join_world(), (1, 2), 4)
    whole = torch.arange(3.0).requires_grad_()
    back = gather(2 * shard(whole, context), context)
    (back.sum() / 4).backward()
    return [back.tolist(), whole.grad.tolist()]


def test_ranks_without_tokens_take_part(ranks: RankPool) -> None:
    found = ranks.run(_fewer_tokens_than_ranks, 4)
    assert [back for back, _ in found] == [[0.0, 2.0, 4.0]] * 4
    assert torch.tensor([grad for _, grad in found]).sum(0).tolist() == [2.0, 2.0, 2.0]


class BeforeInsideAfter(nn.Module):
    """Parameters before a region, in it, and after it; one of them is used both inside and outside."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before, self.inside, self.after = (nn.Linear(4, 4).double() for _ in range(3))
        self.everywhere = nn.Parameter(torch.randn(4, dtype=torch.float64))

    def loss(self, tokens: Tensor, context: Any = None) -> Tensor:
        x = torch.tanh(self.before(tokens)) * self.everywhere
        x = x if context is None else shard(x, context)
        x = torch.tanh(self.inside(x)) * self.everywhere
        x = x if context is None else gather(x, context)
        # Tokens count differently, and pairwise: no rank could have computed its part of this loss alone.
        y = self.after(x) * self.everywhere
        return (y * torch.arange(len(y), dtype=y.dtype)[:, None]).square().mean() + (y[1:] * y[:-1]).sum()


def tokens() -> Tensor:
    return torch.randn(TOKENS, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def all_gradients(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    return {"x": x.grad} | {name: p.grad for name, p in model.named_parameters()}


def _own_gradients(size: int, layout: str) -> tuple[float, dict[str, Any]]:
    groups = join_world()
    chosen = random_layout(LENGTHS, size, seed=5) if layout == "random" else layout
    context = own_context(groups, LENGTHS, size, chosen)
    model, x = BeforeInsideAfter(), tokens().requires_grad_()
    loss = model.loss(x, context)
    (loss / context.size).backward()
    return loss.item(), {name: grad.numpy() for name, grad in all_gradients(model, x).items()}


@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "random"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_gradients_of_the_loss_over_c_add_up_to_those_of_one_process(ranks: RankPool, size: int, layout: str) -> None:
    model, x = BeforeInsideAfter(), tokens().requires_grad_()
    loss = model.loss(x)
    loss.backward()
    found = ranks.run(_own_gradients, size, size, layout)
    assert [value for value, _ in found] == pytest.approx([loss.item()] * size, rel=1e-12)
    for name, expected in all_gradients(model, x).items():
        total = sum(torch.from_numpy(grads[name]) for _, grads in found)
        torch.testing.assert_close(total, expected, rtol=1e-12, atol=1e-12, msg=name)
