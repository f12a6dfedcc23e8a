"""Plain models, and how they are told where each token lies: position_ids, positions, or litgpt's input_pos."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_dcp import next_token_loss
from lightning_dcp.errors import RegionError
from lightning_dcp.models.adapter import ModelAdapter
from lightning_dcp.models.discovery import find_regions
from lightning_dcp.models.positions import positions_argument
from tests.models.runs import Arm, Arms, assert_arm, on_ranks, train
from tests.support.ranks import RankPool
from tests.support.training import VOCAB


class Block(nn.Module):
    """Attention as litgpt has it: rotary tables, one projection for q, k and v, torch's function."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attn, self.proj = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = self.attn(self.norm(x)).unflatten(-1, (6, 8)).transpose(1, 2).chunk(3, dim=1)
        q, k = (t * cos + torch.cat([-t[..., 4:], t[..., :4]], -1) * sin for t in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.proj(y.transpose(1, 2).flatten(2))


class Body(nn.Module):
    """What the models below share."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.wte, self.lm_head = nn.Embedding(VOCAB, 16), nn.Linear(16, VOCAB)
        self.h = nn.ModuleList([Block(), Block()])
        angles = torch.outer(torch.arange(128.0), 10.0 ** -torch.arange(4.0)).repeat(1, 2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.4)

    def run(self, idx: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = self.wte(idx)
        for block in self.h:
            x = block(x, cos, sin)
        return self.lm_head(x)


class LitGPT(Body):
    """litgpt: ``input_pos`` is ``[T]``; without it, tokens lie one after another."""

    def forward(self, idx: Tensor, input_pos: Tensor | None = None) -> Tensor:
        if input_pos is None:
            return self.run(idx, self.cos[: idx.shape[1]], self.sin[: idx.shape[1]])
        assert input_pos.dim() == 1
        return self.run(idx, self.cos.index_select(0, input_pos), self.sin.index_select(0, input_pos))


class TorchTitan(Body):
    """torchtitan: ``positions`` is ``[1, T]``, with an axis for the batch."""

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        if positions is None:
            return self.run(tokens, self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]])
        return self.run(tokens, self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1))


class Unaware(Body):
    """No way to be told."""

    def forward(self, idx: Tensor) -> Tensor:
        return self.run(idx, self.cos[: idx.shape[1]], self.sin[: idx.shape[1]])


def of_logits(model: nn.Module, batch: Any) -> Tensor:
    return next_token_loss(model(batch["input_ids"]), batch)


class Plain(Arms):
    """One of the models above, found by itself."""

    def __init__(self, kind: type[Body]) -> None:
        super().__init__({})
        self.arms = {"gpt": Arm("none", of_logits)}
        self.models = nn.ModuleDict({"gpt": kind()})

    def forward(self, *_: Any) -> None:
        raise AssertionError("not called")


def train_plain(kind: type[Body], strategy: dict[str, Any] | None, fmt: str = "padded") -> dict[str, Any]:
    """A job: train a plain model."""
    named = {"regions": ["models.gpt"]} if strategy is not None else {}
    return train(Plain(kind), strategy=None if strategy is None else strategy | named, fmt=fmt)


@pytest.mark.parametrize(("kind", "fmt"), [(LitGPT, "padded"), (TorchTitan, "packed")])
@pytest.mark.parametrize("world", [4, pytest.param(2, marks=pytest.mark.slow), pytest.param(6, marks=pytest.mark.slow)])
def test_models_that_take_positions_by_another_name(ranks: RankPool, world: int, kind: type[Body], fmt: str) -> None:
    expected = ranks.run(train_plain, 1, kind, None)[0]
    assert_arm("gpt", ranks.run(train_plain, world, kind, on_ranks(world), fmt), expected)


def test_names_of_the_argument() -> None:
    assert positions_argument(LitGPT()) == "input_pos"
    assert positions_argument(TorchTitan()) == "positions"
    assert positions_argument(torch.compile(TorchTitan(), backend="eager")) == "positions"
    assert positions_argument(Unaware()) is None


def test_a_model_without_positions_is_refused_with_what_to_do() -> None:
    with pytest.raises(RegionError, match=r"Unaware.forward has no argument for positions.*add `position_ids=None`"):
        ModelAdapter(Unaware())
    with pytest.raises(RegionError, match=r"'gpt' \(Unaware, forward takes no positions\).*position_ids=None"):
        find_regions(nn.ModuleDict({"gpt": Unaware()}), None, forward_overridden=False)
    assert list(find_regions(nn.ModuleDict({"gpt": LitGPT()}), None, forward_overridden=False).modules) == ["gpt"]
