"""What cannot be right is refused: early, all at once, with what was asked, what was found and what to do."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler
from torchmetrics import MeanMetric

from lightning_dcp import ConfigurationError, DCPStrategy, Decoder, SchedulerCallback, StaticScheduler, StepPlan
from lightning_dcp.errors import (
    BatchError,
    DCPError,
    PlanError,
    PlanMismatchError,
    RegionError,
    UnsupportedAttentionError,
)
from lightning_dcp.schedule import CostModel
from tests.support.ranks import RankPool
from tests.support.training import VOCAB, RaggedTokens, TinyModule, loader, trainer


def fit(
    module: Callable[[], L.LightningModule], data: Callable[[], Any], strategy: Any = None, callback: Any = None
) -> None:
    """Train; module, data and callback are made in the rank, as they need not be picklable."""
    callbacks = [callback()] if callback else []
    trainer(strategy=strategy or {}, callbacks=callbacks, precision="32-true").fit(module(), data())


def refusal(ranks: RankPool, *args: Any, world: int = 1, **options: Any) -> str:
    """What rank 0 says when training is refused; every rank has to refuse."""
    outcomes = ranks.run_all(fit, world, *args, timeout=40, **options)
    assert not any(ok for ok, _ in outcomes)
    return str(outcomes[0][1])


def test_wrong_arguments_are_listed_together() -> None:
    with pytest.raises(ConfigurationError) as caught:
        DCPStrategy(0, max_seqlen_per_dp_cp_rank=-1, loss_normalization="mean", layout="spiral")  # type: ignore[arg-type]
    assert len(caught.value.problems) == 4
    for asked in ("context_parallel_size=0", "max_seqlen_per_dp_cp_rank=-1", "'mean'", "'spiral'"):
        assert asked in str(caught.value)


def test_the_sizes_in_force_are_printed(ranks: RankPool) -> None:
    text = ranks.run(described, 4)[0]
    assert "dynamic, sizes 1, 2, 4 on a plane of 4 rank(s) (world 4 / TP 1 / PP 1)" in text
    assert "at most 16 tokens a rank, 64 a sample" in text
    assert "regions: model" in text


def described() -> str:
    run = trainer(strategy={"max_seqlen_per_dp_cp_rank": 16})
    run.fit(TinyModule(), loader((5, 3), 2))
    return run.strategy.describe()


def test_unknown_options_are_errors() -> None:
    with pytest.raises(TypeError, match="contxt_parallel_size"):
        DCPStrategy(contxt_parallel_size=2)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("devices", "options", "words"),
    [
        (2, {"context_parallel_size": 4}, ["context_parallel_size=4", "plane of 2 rank(s)", "use one of [1, 2]"]),
        (3, {"tensor_model_parallel_size": 2}, ["a world of 3 ranks, which 2 does not divide", "multiple of 2 ranks"]),
        (
            4,
            {"virtual_pipeline_model_parallel_size": 2},
            ["a pipeline of one stage", "use pipeline_model_parallel_size"],
        ),
        (4, {"sequence_parallel": True}, ["sequence_parallel=True", "tensor_model_parallel_size=1"]),
        (4, {"expert_model_parallel_size": 3}, ["expert_model_parallel_size=3", "which 3 does not divide"]),
    ],
)
def test_sizes_are_checked_when_the_trainer_is_made(devices: int, options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        L.Trainer(accelerator="cpu", devices=devices, strategy=DCPStrategy(**options), logger=False)
    for word in words:
        assert word in str(caught.value)


class Manual(TinyModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class TwoModels(TinyModule):
    def __init__(self) -> None:
        super().__init__()
        self.other = Decoder(VOCAB, hidden_size=16, num_layers=1, num_heads=2)


class NoPositions(TinyModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB))


class Mixing(TinyModule):
    def __init__(self) -> None:
        super().__init__()
        self.model.blocks[1].conv = nn.Conv1d(16, 16, 3)


class BatchNormHead(TinyModule):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.BatchNorm1d(4)


@pytest.mark.parametrize(
    ("module", "strategy", "words"),
    [
        (BatchNormHead, {}, ["layer 'head' (BatchNorm1d)", "statistics over the batch"]),
        (Manual, {}, ["manual optimization in Manual", "return the loss from training_step"]),
        (
            TwoModels,
            {},
            ["more than one module", "'model' (Decoder, can be one)", "'other'", "DCPStrategy(regions=[...])"],
        ),
        (NoPositions, {}, ["no context-parallel region", "forward takes no positions"]),
        (NoPositions, {"regions": ["model"]}, ["no argument for positions", "A shard does not start at position 0"]),
        (TinyModule, {"regions": ["modle"]}, ["no module 'modle'", "'model'"]),
        (Mixing, {}, ["layer 'model.blocks.1.conv' (Conv1d)", "mixes tokens"]),
    ],
)
def test_modules_are_checked_at_set_up(
    ranks: RankPool, module: Any, strategy: dict[str, Any], words: list[str]
) -> None:
    text = refusal(ranks, module, partial(loader, (5, 3), 2), strategy)
    for word in ["ConfigurationError", *words]:
        assert word in text


class Both(Manual, TwoModels):
    pass


def test_problems_of_a_module_are_listed_together(ranks: RankPool) -> None:
    assert "ConfigurationError: 2 problem(s)" in refusal(ranks, Both, partial(loader, (5, 3), 2))


def test_a_named_region_is_enough_with_two_models(ranks: RankPool) -> None:
    ranks.run(fit, 1, TwoModels, partial(loader, (5, 3), 2), {"regions": ["model"]})


def collate_tuple(samples: list[dict[str, Any]]) -> Any:
    return tuple(sample["input_ids"] for sample in samples)


def tuples() -> DataLoader:
    return DataLoader(RaggedTokens((3, 4)), batch_size=2, collate_fn=collate_tuple)


def test_unknown_formats_are_named(ranks: RankPool) -> None:
    text = refusal(ranks, TinyModule, tuples)
    assert re.search(r"BatchError: unknown batch format: found tuple.*PackedBatch.*jagged", text)


@pytest.mark.parametrize("fmt", ["padded", "packed", "jagged"])
def test_empty_samples_are_named(ranks: RankPool, fmt: str) -> None:
    assert "BatchError: empty sample(s) [1]" in refusal(ranks, TinyModule, partial(loader, (3, 0, 4), 3, fmt))


def test_a_sample_too_long_is_named_with_what_would_fit(ranks: RankPool) -> None:
    data = partial(loader, (3, 4, 9, 2), 2, "packed")
    text = refusal(ranks, TinyModule, data, {"max_seqlen_per_dp_cp_rank": 4}, world=2)
    for word in ("SampleTooLongError", "(id 2)", "has 9 tokens", "need 3 ranks", "largest length that fits is 8"):
        assert word in text


def distributed() -> DataLoader:
    data = RaggedTokens((3, 4, 5, 6))
    return DataLoader(data, batch_size=2, collate_fn=loader((1,), 1).collate_fn, sampler=DistributedSampler(data, 2, 0))


def test_a_distributed_sampler_is_refused(ranks: RankPool) -> None:
    assert "DistributedSampler over 2 replicas" in refusal(ranks, TinyModule, distributed)


def other_strategy() -> None:
    trainer(strategy=None, callbacks=[SchedulerCallback()]).fit(TinyModule(), loader((3, 4), 2))


def test_the_scheduler_callback_needs_the_strategy(ranks: RankPool) -> None:
    ok, text = ranks.run_all(other_strategy, 1)[0]
    assert not ok
    assert "a SchedulerCallback among the trainer's callbacks" in text


class Cut(TinyModule):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(batch["input_ids"][:, :-1]).sum()


class PerSample(TinyModule):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(batch["input_ids"], position_ids=torch.zeros(3, 3, 3)).sum()


@pytest.mark.parametrize(("module", "fmt"), [(Cut, "packed"), (PerSample, "padded")])
def test_arguments_that_cannot_be_cut_are_refused(ranks: RankPool, module: Any, fmt: str) -> None:
    text = refusal(ranks, module, partial(loader, (5, 3), 2, fmt))
    assert re.search("RegionError: region 'model' was called with a tensor of shape.*must be per-token", text)


class Attending(nn.Module):
    """One attention layer that is not causal self-attention over the tokens."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.embedding = kind, nn.Embedding(VOCAB, 8)

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        x = self.embedding(input_ids).unsqueeze(1)
        if self.kind == "by hand":
            scores = (x @ x.transpose(-1, -2)).masked_fill(torch.ones(x.shape[2], x.shape[2]).triu(1).bool(), -1e9)
            return (scores.softmax(-1) @ x).squeeze(1)
        if self.kind == "mask":
            return F.scaled_dot_product_attention(x, x, x, attn_mask=torch.ones(x.shape[2], x.shape[2]).bool()).squeeze(
                1
            )
        dropout_p = 0.1 if self.kind == "drop" else 0.0
        return F.scaled_dot_product_attention(x, x, x, is_causal=True, dropout_p=dropout_p).squeeze(1)


class Attends(TinyModule):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.model = nn.ModuleDict()  # type: ignore[assignment]
        self.net = Wrapped(kind)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch["input_ids"]).sum()


class Wrapped(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner = Attending(kind)

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        return self.inner(input_ids, position_ids)


@pytest.mark.parametrize(
    ("kind", "word"),
    [
        ("by hand", "softmax over tokens"),
        ("mask", "attn_mask is given"),
        ("drop", "dropout_p=0.1"),
    ],
)
def test_other_attention_is_refused_by_the_name_of_its_layer(ranks: RankPool, kind: str, word: str) -> None:
    text = refusal(ranks, partial(Attends, kind), partial(loader, (5, 3), 2))
    assert "ConfigurationError: 1 problem(s)" in text
    assert "asked: layer 'net.inner' (Attending) inside a context-parallel region" in text
    assert word in text


class Late(Attending):
    """Attends in a way that a call with tokens alone does not show."""

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, causal: bool = True) -> Tensor:
        self.kind = "causal" if causal else "by hand"
        return super().forward(input_ids, position_ids)


class AttendsLate(Attends):
    def __init__(self) -> None:
        super().__init__("causal")
        self.net = nn.Module()
        self.net.inner = Late("causal")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net.inner(batch["input_ids"], causal=False).sum()


def test_attention_that_only_a_real_call_shows_is_refused_at_that_call(ranks: RankPool) -> None:
    text = refusal(ranks, AttendsLate, partial(loader, (5, 3), 2), {"regions": ["net.inner"]})
    assert "UnsupportedAttentionError: layer 'net.inner': softmax over tokens" in text


class Beside(TinyModule):
    """Calls a part of its model instead of the model."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model.embedding(batch["input_ids"]).sum()


def test_a_step_beside_its_region_is_refused(ranks: RankPool) -> None:
    text = refusal(ranks, Beside, partial(loader, (5, 3), 2))
    assert "RegionError: the step of Beside called none of its context-parallel regions ['model']" in text


class Gathers(TinyModule):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.all_gather(loss)
        return loss


class Computes(TinyModule):
    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.mean.update(loss.detach())
        self.mean.compute()
        return loss


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (Gathers, "all_gather inside a step"),
        (Computes, "computed over all ranks inside a step"),
    ],
)
def test_steps_that_would_wait_for_each_other_are_refused(ranks: RankPool, module: Any, words: str) -> None:
    assert words in refusal(ranks, module, partial(loader, (5, 3, 9), 3), {"max_seqlen_per_dp_cp_rank": 9}, world=2)


@pytest.mark.parametrize("cost", [{"linear": -1.0}, {"attention": float("nan")}, {"linear": 0.0, "attention": 0.0}])
def test_cost_models_without_sense_are_refused(cost: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError):
        CostModel(**({"linear": 1e-5, "attention": 2e-9} | cost))


class NoneLoss(TinyModule):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        return None


class VectorLoss(TinyModule):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(batch["input_ids"])[0, :, 0]


@pytest.mark.parametrize("module", [NoneLoss, VectorLoss])
def test_a_step_must_return_a_scalar_loss(ranks: RankPool, module: Any) -> None:
    text = refusal(ranks, module, partial(loader, (5, 3), 2))
    assert "BatchError: training_step must return a scalar loss for every pack" in text


class Incomplete:
    """A scheduler that forgets all samples."""

    def schedule(self, lengths: Any) -> StepPlan:
        return StepPlan(1, 64, tuple(lengths), ())


def test_a_users_plan_is_checked(ranks: RankPool) -> None:
    callback = partial(SchedulerCallback, Incomplete())
    text = refusal(ranks, TinyModule, partial(loader, (5, 3), 2), callback=callback)
    assert "PlanError: every sample must be planned exactly once" in text


class RankBound:
    """A scheduler that plans another order on another rank."""

    def schedule(self, lengths: Any) -> Any:
        odd = os.environ["RANK"] == "1"
        return StaticScheduler(2, 64, 2 if odd else 1).schedule(lengths)


def different_plans() -> None:
    run = trainer(strategy={"max_seqlen_per_dp_cp_rank": 64}, callbacks=[SchedulerCallback(RankBound())])
    run.fit(TinyModule(), loader((5, 3), 2))


def test_plans_that_differ_between_ranks_are_refused(ranks: RankPool) -> None:
    for ok, text in ranks.run_all(different_plans, 2):
        assert not ok
        assert PlanMismatchError.__name__ in text
        assert "ranks hold different plans: rank(s) [1] differ from rank 0" in text


class LogsByLength(TinyModule):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.model(batch["input_ids"]).float().sum()
        self.log("long" if batch["input_ids"].shape[1] > 10 else "short", loss)
        return loss


def different_keys() -> None:
    trainer(strategy={"max_seqlen_per_dp_cp_rank": 8}).fit(LogsByLength(), loader((14, 3), 2))


def test_keys_logged_for_some_packs_only_are_refused(ranks: RankPool) -> None:
    for ok, text in ranks.run_all(different_keys, 2, timeout=20):
        assert not ok
        assert "self.log was called with ['long', 'short'] for some packs" in text


def test_every_error_is_one_kind() -> None:
    kinds = (ConfigurationError, BatchError, PlanError, RegionError, UnsupportedAttentionError)
    assert all(issubclass(kind, DCPError) for kind in kinds)
