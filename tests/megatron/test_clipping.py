"""The gradient norm and clipping over ranks that hold parts, copies and experts; one process is the oracle."""

import math
from contextlib import nullcontext
from dataclasses import dataclass

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_dcp import GradientNorm
from lightning_dcp.models.megatron.clipping import gradient_norm
from lightning_dcp.parallel.clock import WaitClock
from tests.megatron import runs
from tests.megatron.runs import LENGTHS, given, plane_of
from tests.support.training import assert_same, loader, trainer

SPLIT = "layers.0.self_attention.linear_proj.weight"
COPIED = "layers.0.input_layernorm.weight"
OUTSIDE = "head.weight"
EXPERT = "layers.0.mlp.experts.local_experts.0.linear_fc1.weight"
NAN, INF = math.nan, math.inf


@dataclass
class Case:
    """Entries of the gradient by weight and rank, and the norm that all ranks must find."""

    entries: dict
    norm: float
    norm_type: float = 2.0


SPLIT_CASES = {
    "parts of 3 and 4": Case({SPLIT: (3, 4)}, 5),
    "a copy of 5": Case({COPIED: (5, 5)}, 5),
    "outside the model": Case({OUTSIDE: (5, 5)}, 5),
    "together": Case({SPLIT: (3, 4), COPIED: (12, 12)}, 13),
    "largest entry": Case({SPLIT: (3, -4)}, 4, INF),
    "p of 1": Case({SPLIT: (3, -4), COPIED: (1, 1)}, 8, 1.0),
    "NaN on a rank": Case({SPLIT: (3, NAN)}, NAN),
    "largest NaN": Case({SPLIT: (NAN, 3)}, NAN, INF),
    "infinite on a rank": Case({SPLIT: (3, INF)}, INF),
}
PLANE_CASES = {"a copy of 5": Case({SPLIT: (5, 5)}, 5)}
EXPERT_CASES = {"experts 3 and 4, dense 12": Case({EXPERT: (3, 4), SPLIT: (12, 12)}, 13)}


class Given(L.Callback):
    """Puts gradients of the test's own in place of the step's, and has the module clip them by a norm of 1."""

    def __init__(self, cases):
        self.cases, self.found = cases, {}

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        parameters = dict(pl_module.named_parameters())
        for name, case in self.cases.items():
            for parameter in parameters.values():
                parameter.grad = torch.zeros_like(parameter)
            chosen = [next(p for n, p in parameters.items() if n.endswith(part)) for part in case.entries]
            for parameter, values in zip(chosen, case.entries.values(), strict=True):
                parameter.grad.view(-1)[0] = values[trainer.global_rank]
            norm = float(trainer.strategy.gradient_norm(optimizer, norm_type=case.norm_type))
            pl_module.clip_gradients(optimizer, 1.0, "norm")
            self.found[name] = norm, [float(p.grad.view(-1)[0]) for p in chosen]
        optimizer.zero_grad()


def given_gradients(config, strategy, cases):
    callback = Given(cases)
    module = runs.SmallGPT(config | {"num_layers": 1})
    module.head = torch.nn.Linear(1, 1)
    trainer(strategy=strategy, callbacks=[callback]).fit(module, loader((6, 5), 2, "packed"))
    return callback.found


@pytest.mark.parametrize(
    ("config", "strategy", "cases"),
    [
        (runs.DENSE, {"tensor_model_parallel_size": 2}, SPLIT_CASES),
        (runs.DENSE, {}, PLANE_CASES),
        (runs.MOE, {"expert_model_parallel_size": 2}, EXPERT_CASES),
    ],
    ids=["TP2", "plane", "EP2"],
)
def test_each_parameter_counts_once_and_all_ranks_scale_alike(ranks, config, strategy, cases):
    for rank, found in enumerate(ranks.run(given_gradients, 2, config, strategy, cases)):
        for name, case in cases.items():
            norm, clipped = found[name]
            assert norm == pytest.approx(case.norm, nan_ok=True), name
            total = sum(c**2 for values in case.entries.values() for c in set(values)) ** 0.5
            expected = [values[rank] / (total + 1e-6) for values in case.entries.values()]
            assert clipped == pytest.approx(expected, nan_ok=True), name


class Watched(runs.SmallGPT):
    """Logs the norm, and has a head of its own behind the model; clips in its own hook where it is told to."""

    def __init__(self, config, *, hook=False, **options):
        super().__init__(config, **options)
        self.hook = hook

    def configure_callbacks(self):
        return [GradientNorm()]

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        own = 0.2 if self.hook else gradient_clip_val
        self.clip_gradients(optimizer, gradient_clip_val=own, gradient_clip_algorithm=gradient_clip_algorithm)


TP2_SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2}
CLIPPED = {
    "by norm": ({"gradient_clip_val": 0.2}, {}),
    "by value": ({"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}, {}),
    "in a hook": ({}, {"hook": True}),
}
TIED = {"clipped": ({"gradient_clip_val": 0.2}, {}), "not clipped": ({}, {})}


def runs_of(config, world, layout, which, **module):
    strategy = {"scheduler": given(plane_of(world, layout)), **layout}
    return {
        name: runs.fit(config, LENGTHS, len(LENGTHS), strategy, make=Watched, module=module | own, **options)
        for name, (options, own) in which.items()
    }


def norm_of(gradients):
    return math.sqrt(sum(float(g.square().sum()) for g in gradients.values()))


def assert_agree(ranks, world, config, layout, which, **module):
    oracle = ranks.run(runs_of, 1, config, 1, {}, which, **module)[0]
    for found in ranks.run(runs_of, world, config, world, layout, which, **module):
        for name, own in found.items():
            assert_same(own, oracle[name], 1e-9)
            norm = norm_of(own["gradients"][-1])
            assert own["logged"]["grad_norm"] == pytest.approx(norm, rel=1e-9)
            assert norm > 0.2  # so that there was something to clip


@pytest.mark.parametrize(
    ("layout", "which"),
    [(TP2_SP, CLIPPED), pytest.param(PP2, CLIPPED, marks=pytest.mark.slow)],
    ids=["TP2+SP", "PP2"],
)
def test_clipped_runs_agree_with_one_process(ranks, layout, which):
    assert_agree(ranks, 4, runs.DENSE, layout, which)


def test_tied_embeddings_of_two_stages_are_one_weight(ranks):
    assert_agree(ranks, 4, runs.DENSE, PP2, TIED, share_embeddings_and_output_weights=True)


@pytest.mark.parametrize(
    "layout",
    [
        TP2_SP | {"expert_model_parallel_size": 2},
        pytest.param({"expert_tensor_parallel_size": 2}, marks=pytest.mark.slow),
        pytest.param(TP2_SP | {"expert_tensor_parallel_size": 1}, marks=pytest.mark.slow),
    ],
    ids=["EP2xTP2+SP", "ETP2", "TP2+SP, ETP1"],
)
def test_clipped_experts_agree_with_one_process(ranks, layout):
    assert_agree(ranks, 4, runs.MOE, layout, {"by norm": CLIPPED["by norm"]})


class Scaled(MixedPrecision):
    """Loss scaling without 16-bit numbers, so that scaled and plain runs can be compared."""

    def __init__(self):
        super().__init__("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0))
        self.precision = "32-true"

    def forward_context(self):
        return nullcontext()


class Spoilt(runs.SmallGPT):
    """Finds an infinite gradient on one rank in its second step."""

    def on_after_backward(self):
        if self.trainer.global_step == 1 and self.trainer.global_rank == 1:
            next(p for p in self.parameters() if p.grad is not None).grad.view(-1)[0] = INF


def scaled(world, layout):
    plugin = Scaled()
    strategy = {"scheduler": given(plane_of(world, layout)), **layout}
    options = {"precision": None, "make": Spoilt, "plugins": [plugin], "gradient_clip_val": 0.2}
    found = runs.fit(runs.DENSE, LENGTHS, len(LENGTHS), strategy, max_epochs=2, **options)
    return found["weights"], plugin.scaler.get_scale()


@pytest.mark.parametrize("layout", [pytest.param(TP2_SP, marks=pytest.mark.slow), PP2], ids=["TP2+SP", "PP2"])
def test_an_infinite_gradient_on_one_rank_skips_the_step_on_all(ranks, layout):
    one_step = ranks.run(runs_of, 1, runs.DENSE, 1, {}, {"": CLIPPED["by norm"]})[0][""]["weights"]
    for weights, scale in ranks.run(scaled, 4, 4, layout):
        assert scale == 512.0
        for name, weight in one_step.items():
            torch.testing.assert_close(weights[name].double(), weight, rtol=1e-5, atol=1e-5)


class FusedSpoilt(runs.SmallGPT):
    """An optimizer that unscales by itself; infinite gradients on some ranks in its second step."""

    def __init__(self, config, *, spoilt, unscale=False, **options):
        super().__init__(config, **options)
        self.spoilt, self.unscale = spoilt, unscale

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.1, eps=1e-2, fused=True)

    def on_after_backward(self):
        if self.trainer.global_step == 1 and self.trainer.global_rank in self.spoilt:
            next(p for p in self.parameters() if p.grad is not None).grad.view(-1)[0] = INF

    def on_before_optimizer_step(self, optimizer):
        if self.unscale:
            self.trainer.precision_plugin.scaler.unscale_(optimizer)


def fused(world, layout, kinds, epochs):
    found = {}
    for name, module in kinds.items():
        plugin, strategy = Scaled(), {"scheduler": given(plane_of(world, layout)), **layout}
        options = {"precision": None, "make": FusedSpoilt, "module": module, "plugins": [plugin], "max_epochs": epochs}
        weights = runs.fit(runs.DENSE, LENGTHS, len(LENGTHS), strategy, **options)["weights"]
        found[name] = weights, plugin.scaler.get_scale()
    return found


def test_fused_optimizers_skip_the_step_on_all_ranks(ranks):
    kinds = {
        "on one rank": {"spoilt": (1,)},
        "on both": {"spoilt": (0, 1)},
        "on both, unscaled by hand": {"spoilt": (0, 1), "unscale": True},
    }
    one_step, _ = ranks.run(fused, 1, 1, {}, {"": {"spoilt": ()}}, 1)[0][""]
    for found in ranks.run(fused, 2, 2, {"tensor_model_parallel_size": 2}, kinds, 2):
        for name, (weights, scale) in found.items():
            assert scale == 512.0, name
            for key, weight in one_step.items():
                torch.testing.assert_close(weights[key], weight, rtol=1e-5, atol=1e-5)


class LargestInFloat32(TorchDispatchMode):
    """Entries of the largest tensor in float32 that is made inside."""

    found = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.dtype == torch.float32:
            self.found = max(self.found, made.numel())
        return made


@pytest.mark.parametrize(("norm_type", "norm"), [(2.0, 40.0), (1.0, 3200.0), (INF, 0.5)])
def test_norms_of_bfloat16_are_summed_in_float32_without_a_copy_of_the_gradients(norm_type, norm):
    gradients = [(torch.full((rows, 100), 0.5, dtype=torch.bfloat16), 1) for rows in (40, 24)]
    options = {"device": torch.device("cpu"), "norm_type": norm_type, "spread": False}
    with LargestInFloat32() as largest:
        assert float(gradient_norm(gradients, WaitClock(), **options)) == pytest.approx(norm, rel=1e-6)
    assert largest.found == 1


def test_micro_batches_of_a_pipeline_are_weighted_by_us_alone(ranks):
    """Megatron-Core's schedules divide a loss by the number of micro-batches, or not, by what a loss function returns."""
    norms = {}
    for world in (2, 4):
        found = ranks.run(runs_of, world, runs.DENSE, world, PP2, {"": ({}, {})})[0][""]
        assert {2: {1}, 4: {1, 2}}[world] == set(found["cp_sizes"][0])
        norms[world] = found["logged"]["grad_norm"]
    whole = ranks.run(runs_of, 1, runs.DENSE, 1, {}, {"": ({}, {})})[0][""]["logged"]["grad_norm"]
    assert norms == pytest.approx({2: whole, 4: whole}, rel=1e-9)
