"""Compiled models under the strategy: the same training, graphs that fit every pack, plain refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_dcp.models.decoder import Block, Decoder
from tests.support.ranks import RankFailure, RankPool
from tests.support.training import Recorder, TinyModule, assert_same, fit, loader, trainer

# Two batches of six. At 40 tokens a rank, 60 and 61 need both ranks.
LENGTHS = (60, 3, 30, 7, 1, 12, 5, 29, 2, 61, 16, 9)
STRATEGY = {"max_seqlen_per_dp_cp_rank": 40, "context_parallel_size": 2}


class CheckpointedBlock(Block):
    """A block that is run again in the backward."""

    use_reentrant = False

    def forward(self, *args: Tensor) -> Tensor:
        return checkpoint(super().forward, *args, use_reentrant=self.use_reentrant)


class CheckpointedLayer(nn.Module):
    """A layer that is run again in the backward, compiled or not."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: Tensor) -> Tensor:
        return checkpoint(self.layer, *args, use_reentrant=False)


def _compile_whole(module: TinyModule, **options: Any) -> None:
    module.model = torch.compile(module.model, **options)


def _compile_in_place(module: TinyModule, **options: Any) -> None:
    module.model.compile(**options)


def _compile_layers(module: TinyModule, **options: Any) -> None:
    for layer in module.model.blocks:
        layer.compile(**options)


def _compile_and_checkpoint_layers(module: TinyModule, **options: Any) -> None:
    layers = (CheckpointedLayer(torch.compile(layer, **options)) for layer in module.model.blocks)
    module.model.blocks = nn.ModuleList(layers)


def _compile_checkpointed(module: TinyModule, **options: Any) -> None:
    for layer in module.model.blocks:
        layer.__class__ = CheckpointedBlock
    _compile_whole(module, **options)


def _compile_nothing(module: TinyModule, **options: Any) -> None:
    pass


WAYS = {
    "whole": _compile_whole,
    "in place": _compile_in_place,
    "layers": _compile_layers,
    "layers, then checkpointed": _compile_and_checkpoint_layers,
    "with checkpointing inside": _compile_checkpointed,
    "lightning module": _compile_nothing,
}


def _plain_name(name: str) -> str:
    return name.replace("_orig_mod.", "").replace(".layer.", ".")


def train(way: str, backend: str, precision: str = "64-true", *, validate: bool = False) -> dict[str, Any]:
    """Train as ``fit`` does, compiled; names of tensors as without compiling."""
    torch._dynamo.reset()
    counters.clear()
    recorder, module = Recorder(), TinyModule()
    WAYS[way](module, backend=backend)
    run = trainer(strategy=STRATEGY, precision=precision, callbacks=[recorder])
    fitted = torch.compile(module, backend=backend) if way == "lightning module" else module
    run.fit(fitted, loader(LENGTHS, 6), loader(LENGTHS[:5], 5) if validate else None)
    return {
        "losses": recorder.losses,
        "gradients": [{_plain_name(n): g for n, g in grads.items()} for grads in recorder.gradients],
        "weights": {_plain_name(n): p.detach().clone() for n, p in module.named_parameters()},
        "logged": {name: float(value) for name, value in run.callback_metrics.items() if name != "val_loss"},
        "cp_sizes": recorder.cp_sizes,
        "graphs": counters["stats"]["unique_graphs"],
    }


LONG = ("lightning module", "layers", "in place")
"""Ways that take many seconds and are near to others."""


@pytest.mark.parametrize("way", [pytest.param(way, marks=pytest.mark.slow) if way in LONG else way for way in WAYS])
def test_training_is_that_of_one_uncompiled_process(ranks: RankPool, way: str) -> None:
    expected = ranks.run(fit, 1, LENGTHS, 6, strategy=None)[0]
    backend = "aot_eager" if way == "whole" else "eager"  # compiling the backward too takes three times as long
    for result in ranks.run(train, 2, way, backend, validate=way == "in place"):
        assert_same(result, expected, 1e-9)
        assert {1, 2} <= {size for batch in result["cp_sizes"] for size in batch}
        assert result["graphs"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("way", ["whole", "layers, then checkpointed"])
def test_training_with_inductor(ranks: RankPool, way: str) -> None:
    expected = ranks.run(fit, 1, LENGTHS, 6, strategy=None, precision="32-true")[0]
    for result in ranks.run(train, 2, way, "inductor", "32-true", timeout=280):
        assert_same(result, expected, 1e-4)


# --- around training


def _names_and_outputs(way: str) -> dict[str, Any]:
    """What a compiled module has before, in and after a run, and what it predicts."""
    torch._dynamo.reset()
    module = TinyModule()
    WAYS[way](module, backend="eager")
    before = {name: dict(vars(m)) for name, m in module.named_modules()}
    run = trainer(strategy=STRATEGY, precision="32-true")
    batches = run.predict(module, loader(LENGTHS, 6))
    changed = [n for n, m in module.named_modules() if any(v is not vars(m).get(k) for k, v in before[n].items())]
    run = trainer(strategy=STRATEGY, precision="32-true")
    run.fit(module, loader(LENGTHS, 6))
    saved = run._checkpoint_connector.dump_checkpoint(weights_only=True)["state_dict"]
    again = TinyModule(seed=5)
    WAYS[way](again, backend="eager")
    again.load_state_dict(saved)
    same = all(torch.equal(p, q) for p, q in zip(again.parameters(), module.parameters(), strict=True))
    return {"predicted": batches, "changed": changed, "keys": list(saved), "same": same}


def _predict_uncompiled() -> Any:
    return trainer(strategy=None, precision="32-true").predict(TinyModule(), loader(LENGTHS, 6))


def _samples(batches: list[Tensor]) -> list[Tensor]:
    """The predictions of each sample without those of its padding."""
    return [row[:n] for row, n in zip((row for batch in batches for row in batch), LENGTHS, strict=True)]


PREFIXES = [
    pytest.param("whole", "model._orig_mod.", marks=pytest.mark.slow),
    pytest.param("in place", "model.", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("way", "prefix"), PREFIXES)
def test_predictions_checkpoints_and_the_module_after_a_run(ranks: RankPool, way: str, prefix: str) -> None:
    expected = ranks.run(_predict_uncompiled, 1)[0]
    for result in ranks.run(_names_and_outputs, 2, way):
        for ours, theirs in zip(_samples(result["predicted"]), _samples(expected), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
        assert result["keys"] == [prefix + name for name in Decoder(tie_embeddings=True, num_layers=2).state_dict()]
        assert result["same"]
        assert "model" not in result["changed"]


# --- refused


class NotCausal(nn.Module):
    """An attention layer that context parallelism cannot run."""

    def forward(self, x: Tensor, *_: Tensor) -> Tensor:
        return x + F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], dropout_p=0.5)[:, 0]


def _refused(case: str) -> None:
    torch._dynamo.reset()
    module, regions = TinyModule(), None
    if case == "fullgraph":
        _compile_whole(module, backend="eager", fullgraph=True)
    elif case == "fullgraph layers":
        _compile_layers(module, backend="eager", fullgraph=True)
    elif case == "inside":
        module.model = torch.compile(nn.Sequential(module.model), backend="eager")
        regions = ["model._orig_mod.0"]
    else:
        module.model.blocks[1] = NotCausal()
        _compile_whole(module, backend="eager")
    trainer(strategy=STRATEGY | {"regions": regions}).fit(module, loader(LENGTHS, 6))


REFUSED = {
    "fullgraph": ("RegionError", "region 'model': a part of it is compiled with fullgraph=True"),
    "fullgraph layers": ("RegionError", "region 'model': a part of it is compiled with fullgraph=True"),
    "inside": ("ConfigurationError", "lies inside 'model', which is compiled as a whole"),
    "attention": ("ConfigurationError", "layer 'model.blocks.1' (NotCausal) inside a context-parallel region"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_compiled_is_refused_plainly(ranks: RankPool, case: str) -> None:
    error, message = REFUSED[case]
    with pytest.raises(RankFailure) as caught:
        ranks.run(_refused, 2, case)
    assert all(f"{error}: " in text and message in text for text in caught.value.failures.values())


def _feed_forwards_in_one_graph() -> list[float]:
    torch._dynamo.reset()
    module, recorder = TinyModule(), Recorder()
    for layer in module.model.blocks:
        layer.ffn.compile(backend="eager", fullgraph=True)
    trainer(strategy=STRATEGY, callbacks=[recorder]).fit(module, loader(LENGTHS, 6))
    return recorder.losses


def test_layers_without_attention_may_be_one_graph(ranks: RankPool) -> None:
    expected = ranks.run(fit, 1, LENGTHS, 6, strategy=None)[0]["losses"]
    torch.testing.assert_close(ranks.run(_feed_forwards_in_one_graph, 2)[0], expected, rtol=1e-9, atol=0)
