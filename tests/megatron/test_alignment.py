"""Runs with the padding of a back end: losses, gradients and weights are those without; what cannot be is refused."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from torch import nn

from lightning_dcp.callbacks import RunSummary
from lightning_dcp.errors import ConfigurationError, PlanError
from lightning_dcp.models.adapter import ModelAdapter
from lightning_dcp.models.megatron import MegatronAdapter
from lightning_dcp.models.megatron.alignment import has_transformer_engine_attention, needed_alignment
from lightning_dcp.models.megatron.replay import TokenPart
from lightning_dcp.parallel.context import make_context
from lightning_dcp.parallel.groups import CPGroup
from lightning_dcp.parallel.watchdog import Watchdog
from lightning_dcp.schedule import Alignment
from tests.megatron import runs
from tests.megatron.engine import transformer_engine
from tests.support.plans import GivenPlan
from tests.support.training import Recorder, TinyModule, assert_same, loader, trainer

LENGTHS = (13, 5, 9, 1, 7, 11, 1)
PACKS = [(0, 4, [0]), (0, 2, [1, 3]), (2, 1, [2]), (3, 1, [4]), (0, 4, [5, 6])]
ALIGNMENTS = {"multiples": Alignment(sample=3, cut=2, rank=4), "equal chunks": Alignment.transformer_engine(2)}
TP_SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}


@contextmanager
def needing(alignment):
    """Models inside are of a back end that needs padding."""
    before = MegatronAdapter.needed_alignment
    ModelAdapter.alignment, MegatronAdapter.needed_alignment = alignment, lambda adapter: alignment
    try:
        yield
    finally:
        ModelAdapter.alignment, MegatronAdapter.needed_alignment = Alignment(), before


class Told(Recorder):
    """Also keeps the last plan, and what the strategy says of the run."""

    def on_train_batch_end(self, trainer, pl_module, outputs, *args):
        super().on_train_batch_end(trainer, pl_module, outputs, *args)
        self.plan, self.said = trainer.strategy.callback.scheduled.plan, trainer.strategy.describe()


# ------------------------------------------------------------------ any module


def tiny(strategy):
    recorder, module, summary = Told(), TinyModule(), RunSummary()
    run = trainer(strategy=strategy, callbacks=[recorder, summary])
    run.fit(module, loader(LENGTHS, len(LENGTHS), "padded"))
    logged = {name: float(value) for name, value in run.callback_metrics.items()}
    result = {"losses": recorder.losses, "gradients": recorder.gradients, "logged": logged}
    return result | {
        "weights": dict(module.state_dict()),
        "plan": recorder.plan,
        "said": recorder.said,
        "padding": summary.padding,
    }


def tiny_job(world):
    """By a given plan with each alignment, by the schedulers, and predictions."""
    with needing(Alignment()):
        found = {"plain": tiny({"scheduler": GivenPlan(world, PACKS if world > 1 else [(0, 1, range(7))])})}
    if world == 1:
        return found
    limit = {"max_seqlen_per_dp_cp_rank": 12}
    for name, alignment in ALIGNMENTS.items():
        with needing(alignment):
            found[name] = tiny({"scheduler": GivenPlan(world, PACKS)})
    with needing(ALIGNMENTS["multiples"]):
        found["multiples, dynamic"] = tiny(limit)
        found["multiples, auto"] = tiny({"scheduler": GivenPlan(world, PACKS), "outputs": "auto"})
        found["multiples, static"] = tiny(limit | {"dynamic_context_parallel": False, "context_parallel_size": 2})
    return found


def test_any_module_trains_as_without_padding(ranks):
    plain = ranks.run(tiny_job, 1, 1)[0]["plain"]
    for own in ranks.run(tiny_job, 4, 4):
        for name, values in own.items():
            assert_same(values, plain, 1e-12)
            alignment = ALIGNMENTS.get(name.split(",")[0], Alignment())
            assert values["plan"].alignment == alignment
            assert ("padding of samples to multiples of 3" in values["said"]) == (alignment.sample == 3)
            values["plan"].validate()
            assert values["padding"] == [sum(values["plan"].padding(pack) for pack in values["plan"].packs())]
            assert (values["padding"] == [0]) == (name == "plain")


@patch.object(Watchdog, "report")  # every rank refuses, so that the first need not wait until the others have read it
def refused_job(report):
    said = []
    for alignment, options in (
        (Alignment.fp8(), {"max_seqlen_per_dp_cp_rank": 100}),
        (Alignment(sample=8), {"outputs": "sharded"}),
        (Alignment(sample=60), {"scheduler": GivenPlan(2, [(0, 1, range(7))])}),
    ):
        with needing(alignment), pytest.raises((ConfigurationError, PlanError)) as caught:
            tiny(options)
        said.append(str(caught.value))
    return said


def test_what_does_not_go_with_padding_is_refused(ranks):
    for small, sharded, plan in ranks.run(refused_job, 2):
        assert "max_seqlen_per_dp_cp_rank=100" in small and "give a multiple of 256 tokens" in small
        assert 'outputs="sharded"' in sharded and "samples to multiples of 8 tokens" in sharded
        assert "420 tokens, 373 of them padding" in plan


# ------------------------------------------------------------------ Megatron-Core models


MOE = runs.MOE | {
    "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"],
    "moe_aux_loss_coeff": [0.1, 0.2],
    "moe_z_loss_coeff": 0.1,
}


def gpt_job(world, alignment, strategy, packs=PACKS):
    stages = strategy.get("pipeline_model_parallel_size", 1)
    plan = GivenPlan(world // stages // strategy.get("tensor_model_parallel_size", 1), packs)
    with needing(alignment):
        return [
            runs.fit(config, LENGTHS, len(LENGTHS), {"scheduler": plan, **strategy}) for config in (runs.DENSE, MOE)
        ]


@pytest.fixture(scope="module")
def plain(ranks):
    return ranks.run(gpt_job, 1, 1, Alignment(), {}, [(0, 1, range(7))])[0]


def test_tensor_and_sequence_parallel_models_train_as_without_padding(ranks, plain):
    """Experts, too: padding is in none of their losses."""
    for own in ranks.run(gpt_job, 8, 8, ALIGNMENTS["multiples"], TP_SP):
        for result, right in zip(own, plain, strict=True):
            assert_same(result, right, 1e-12)


@pytest.mark.slow
def test_pipelines_train_as_without_padding(ranks, plain):
    packs = [(0, 2, [0]), (0, 1, [1, 3]), (1, 1, [2]), (0, 2, [4]), (0, 2, [5, 6])]
    strategy = {"pipeline_model_parallel_size": 2}
    for own in ranks.run(gpt_job, 4, 4, ALIGNMENTS["multiples"], strategy, packs):
        for result, right in zip(own, plain, strict=True):
            assert_same(result, right, 1e-12)


def engine_job(world, strategy):
    plan = GivenPlan(world // strategy.get("tensor_model_parallel_size", 1), PACKS)
    with transformer_engine() as calls:
        result = runs.fit(runs.DENSE, LENGTHS, len(LENGTHS), {"scheduler": plan, **strategy})
        return result | {"calls": list(calls)}


@pytest.mark.parametrize("strategy", [TP_SP, pytest.param({}, marks=pytest.mark.slow)], ids=["TP2+SP", "TP1"])
def test_layers_of_transformer_engine_get_equal_chunks(ranks, plain, strategy):
    """Packs of four, two and one rank; without sequence parallelism chunks need not be dealt out further."""
    tp = strategy.get("tensor_model_parallel_size", 1)
    layers, padded = runs.DENSE["num_layers"], Alignment.transformer_engine(tp).padded_lengths
    packs = [(c, [LENGTHS[s] for s in samples]) for _, c, samples in PACKS]
    results = ranks.run(engine_job, 4 * tp, 4 * tp, strategy)
    for rank, own in enumerate(results):
        place = rank // tp
        mine = [
            (c, list(padded(n, c)))
            for (first, c, _), (_, n) in zip(PACKS, packs, strict=True)
            if first <= place < first + c
        ]
        assert own["calls"] == [call for call in mine for _ in range(layers)]
        assert_same(own, plain[0], 1e-12)


def test_replayed_routes_know_where_padding_lies():
    group, lengths = CPGroup(None, (0, 1)), (7, 1, 5)
    for rank in (0, 1):
        context = make_context(group, rank, lengths, exchange=object(), alignment=ALIGNMENTS["equal chunks"])
        parts = [TokenPart(index, 2) for index in (0, 1)]
        rows = [part.rows(context) for part in parts]
        assert sum(rows) == context.num_region_tokens > context.num_local_tokens
        found = [part.places(context) for part in parts]
        assert torch.equal(torch.cat([positions for _, positions in found]), context.pack_index)
        for (places, _), real in zip(found, context.is_real.split(rows), strict=True):
            assert torch.equal(places, real.nonzero().flatten())


# ------------------------------------------------------------------ who needs it


def config_of(**fields):
    return SimpleNamespace(**{"tensor_model_parallel_size": 2, "sequence_parallel": False, "fp8": None} | fields)


def test_what_a_config_needs():
    assert needed_alignment(config_of(), transformer_engine_attention=False) == Alignment()
    assert needed_alignment(config_of(), transformer_engine_attention=True) == Alignment.transformer_engine()
    parts = needed_alignment(config_of(sequence_parallel=True), transformer_engine_attention=True)
    assert parts == Alignment.transformer_engine(2)
    both = needed_alignment(config_of(fp8="e4m3"), transformer_engine_attention=True)
    assert both == Alignment.fp8(2) == Alignment(16, 4, 512)


def test_transformer_engines_attention_is_found_among_the_layers():
    layer = nn.Identity()
    model = nn.ModuleDict({"chunks": nn.ModuleList([nn.Linear(2, 2), layer])})
    assert not has_transformer_engine_attention(model)
    layer.needs_equal_chunks = True
    assert has_transformer_engine_attention(model)
