"""Runs with each exchange scheme, kernel and kind of attention train as one process does."""

from __future__ import annotations

import io
import os
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import Tensor, nn

from lightning_dcp import ConfigurationError, DCPStrategy, RunSummary, next_token_loss
from lightning_dcp.attention import attention
from lightning_dcp.attention.choice import SchemeChooser
from lightning_dcp.parallel import layout as layouts
from lightning_dcp.parallel.layout import PackLayout
from tests.support.ranks import RankPool
from tests.support.training import VOCAB, Recorder, assert_same, fit, loader, trainer

LENGTHS = (60, 3, 30, 7, 1, 12, 5, 29, 2, 61, 16, 9)
TWO_HEADS = {"kv_heads": 2}


@pytest.fixture(scope="module")
def alone(ranks: RankPool) -> dict[str, Any]:
    return ranks.run(fit, 1, LENGTHS, 6, strategy=None, module=TWO_HEADS)[0]


@pytest.mark.parametrize(
    "options",
    [
        {"attention": "ring"},
        pytest.param({"attention": "all_gather"}, marks=pytest.mark.slow),
        pytest.param({"attention": "ulysses"}, marks=pytest.mark.slow),
        {"attention": "auto", "links": "measured"},
        {"attention": "ulysses", "layout": "contiguous", "attention_kernel": "reference"},
        {"attention": "all_gather", "schedule_mode": "lockstep"},
    ],
)
def test_every_scheme_trains_as_one_process(ranks: RankPool, alone: dict[str, Any], options: dict[str, Any]) -> None:
    strategy = {"max_seqlen_per_dp_cp_rank": 16, **options}
    for ours in ranks.run(fit, 4, LENGTHS, 6, strategy=strategy, module=TWO_HEADS):
        assert_same(ours, alone, 1e-9)
        assert {size for sizes in ours["cp_sizes"] for size in sizes} > {1}


def _backwards(lengths: Any, size: int) -> PackLayout:
    """Every third token to the same rank, the last rank first: nothing that balances, but a layout."""
    ranks: list[list[tuple[int, int, int]]] = [[] for _ in range(size)]
    for sample, length in enumerate(lengths):
        for start in range(0, length, 3):
            ranks[-1 - start % size].append((sample, start, min(length, start + 3)))
    return PackLayout.from_chunks(lengths, [reversed(chunks) for chunks in ranks])


def _fit_with_own_layout() -> dict[str, Any]:
    layouts.LAYOUTS["backwards"] = _backwards
    try:
        strategy = {"max_seqlen_per_dp_cp_rank": 48, "layout": "backwards", "min_context_parallel_size": 2}
        return fit(LENGTHS, 6, strategy=strategy, module=TWO_HEADS)
    finally:
        del layouts.LAYOUTS["backwards"]


def test_a_layout_of_ones_own(ranks: RankPool, alone: dict[str, Any]) -> None:
    for ours in ranks.run(_fit_with_own_layout, 4):
        assert_same(ours, alone, 1e-9)


# ------------------------------------------------------------ other kinds


class Layer(nn.Module):
    """Attention as this package's function gives it, with learned sinks."""

    def __init__(self, width: int, **options: Any) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 4 * width), nn.Linear(width, width)
        self.sinks = nn.Parameter(torch.randn(2))
        self.options = options

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (8, -1)).transpose(1, 2)  # 4 heads of queries and keys in two halves each
        q, k, v = (
            torch.cat([heads[:, 0:2], heads[:, 2:4]], -1),
            torch.cat([heads[:, 4:5], heads[:, 5:6]], -1),
            heads[:, 6:7],
        )
        mixed = attention(q, k, v, sinks=self.sinks, **self.options)  # value heads are half as wide
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class Model(nn.Module):
    """Alternating windows and a soft-cap, positions learned."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, 16), nn.Embedding(64, 16)
        self.layers = nn.ModuleList(
            [Layer(16, window_size=(4, 0)), Layer(16, softcap=3.0), Layer(16, window_size=(0, 0))]
        )
        self.head = nn.Linear(16, VOCAB)

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1]).expand_as(input_ids)
        x = self.tokens(input_ids) + self.places(position_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.model = Model()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return next_token_loss(self.model(batch["input_ids"]), batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def _fit_kinds(strategy: dict[str, Any] | None) -> dict[str, Any]:
    recorder, model = Recorder(), Module()
    run = trainer(strategy=strategy, callbacks=[recorder])
    run.fit(model, loader(LENGTHS, 6))
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return {"losses": recorder.losses, "gradients": recorder.gradients, "weights": weights, "logged": {}}


@pytest.mark.parametrize("scheme", ["ring", "all_gather", "ulysses"])
def test_windows_soft_cap_sinks_and_narrow_values(ranks: RankPool, scheme: str) -> None:
    (alone,) = ranks.run(_fit_kinds, 1, None)
    assert all(alone["gradients"][0][f"model.layers.{i}.sinks"].abs().max() > 0 for i in range(3))
    for ours in ranks.run(_fit_kinds, 4, {"max_seqlen_per_dp_cp_rank": 16, "attention": scheme}):
        assert_same(ours, alone, 1e-9)


class StepByStep(nn.Module):
    """Says causal only where there is more than one query, as models do that also generate token by token."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, 8), nn.Embedding(64, 8)
        self.qkv, self.head = nn.Linear(8, 24), nn.Linear(8, VOCAB)
        self.seen: list[int] = []

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1]).expand_as(input_ids)
        x = self.tokens(input_ids) + self.places(position_ids)
        q, k, v = self.qkv(x).unflatten(-1, (6, 4)).transpose(1, 2).chunk(3, 1)
        self.seen.append(q.shape[2])
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1)
        return self.head(x + mixed.transpose(1, 2).flatten(2))


class StepByStepModule(Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = StepByStep()  # type: ignore[assignment]


def _fit_short(strategy: dict[str, Any] | None) -> dict[str, Any]:
    recorder, model = Recorder(), StepByStepModule()
    trainer(strategy=strategy, callbacks=[recorder]).fit(model, loader((7, 3, 2, 5, 6, 4), 1))
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    seen = model.model.seen
    return {"losses": recorder.losses, "gradients": recorder.gradients, "weights": weights, "logged": {}, "seen": seen}


@pytest.mark.parametrize("scheme", ["ring", "all_gather", "ulysses", "auto"])
def test_samples_of_which_a_rank_has_one_token_or_none(ranks: RankPool, scheme: str) -> None:
    (alone,) = ranks.run(_fit_short, 1, None)
    strategy = {"dynamic_context_parallel": False, "context_parallel_size": 4, "attention": scheme}
    for ours in ranks.run(_fit_short, 4, strategy):
        assert_same(ours, alone, 1e-9)
        assert min(ours["seen"]) == 2


# --------------------------------------------------------- what is reported


def _report(options: dict[str, Any]) -> tuple[str, str, Any]:
    from rich.console import Console

    from tests.support.training import TinyModule

    summary, model = RunSummary(), TinyModule(**TWO_HEADS)
    strategy: dict[str, Any] = {
        "max_seqlen_per_dp_cp_rank": 64 // int(os.environ["TEST_WORLD_SIZE"]),
        "min_context_parallel_size": 2,
    }
    strategy |= options
    run = trainer(strategy=strategy, callbacks=[summary])
    run.fit(model, loader(LENGTHS, 6))
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(summary._table(run, "."))
    chooser = run.strategy.attention.scheme
    picked = dict(chooser.picked) if isinstance(chooser, SchemeChooser) else None
    return run.strategy.describe(), console.export_text(), picked


def test_what_was_picked_is_in_the_summary_and_the_settings_in_the_description(ranks: RankPool) -> None:
    description, table, picked = ranks.run(_report, 4, {"links": "measured"})[0]
    assert "attention scheme chosen for each call (links measured: CP 2 " in description
    assert {size for size, _ in picked} == {2, 4}
    for (size, scheme), count in picked.items():
        assert f"CP {size} {scheme}: {count}" in table
    assert sum(picked.values()) % 2 == 0  # two layers


def test_a_fixed_scheme_is_described_and_not_counted(ranks: RankPool) -> None:
    description, table, picked = ranks.run(_report, 2, {"attention": "ulysses", "attention_kernel": "cpu_flash"})[0]
    assert "attention by ulysses, kernel cpu_flash" in description
    assert "attention calls" not in table
    assert picked is None


def test_without_being_asked_links_are_not_measured_on_cpu(ranks: RankPool) -> None:
    description, *_ = ranks.run(_report, 2, {})[0]
    assert "links as in the cost model" in description


def test_unknown_values_are_refused_all_at_once() -> None:
    with pytest.raises(ConfigurationError) as caught:
        DCPStrategy(attention="rings", attention_kernel="fast", links="guessed")  # type: ignore[arg-type]
    for text in ("attention='rings'", "attention_kernel='fast'", "links='guessed'", "'ulysses'", "'cpu_flash'"):
        assert text in str(caught.value)


def test_a_layout_of_ones_own_that_is_none_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(layouts.LAYOUTS, "own", lambda lengths, ranks: PackLayout.from_chunks(lengths, ranks))
    with pytest.raises(ConfigurationError, match=r"layout='own'[\s\S]*TypeError"):
        DCPStrategy(layout="own")


def test_links_that_nothing_would_look_at_are_not_measured() -> None:
    with pytest.raises(ConfigurationError, match="links='measured' with attention='ring'"):
        DCPStrategy(attention="ring", links="measured")


def test_a_kernel_that_cannot_serve_is_refused_with_its_reason(ranks: RankPool) -> None:
    strategy = {"max_seqlen_per_dp_cp_rank": 64, "attention_kernel": "cuda_flash"}
    results = ranks.run_all(fit, 1, LENGTHS, 6, strategy=strategy, module=TWO_HEADS)
    assert "cuda_flash" in results[0][1]
    assert "it runs on cuda, not on cpu" in results[0][1]
