"""After a run the user's metrics are as they were, and right in runs of other kinds in the same process."""

from __future__ import annotations

import gc
import os
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchmetrics import MeanMetric, Metric, MetricCollection, SumMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score, MulticlassPrecision

from lightning_dcp import PerformanceMonitor, next_token_loss
from lightning_dcp.batch.labels import shifted_labels
from lightning_dcp.step.metric_state import StateSync
from lightning_dcp.step.metrics import metrics_of, metrics_of_batch, release_metrics
from tests.support.ranks import RankPool, _free_port
from tests.support.training import VOCAB, TinyModule, loader, trainer

LENGTHS = (30, 3, 30, 7, 1, 12)
VALIDATION = (9, 31, 12, 4)
QUIET: dict[str, Any] = {"enable_progress_bar": False, "enable_checkpointing": False}
DCP = {"max_seqlen_per_dp_cp_rank": 16}


class OwnSync(SumMetric):
    """Gathers in a way of its own."""

    def _sync_dist(self, *args: Any, **kwargs: Any) -> None:
        super()._sync_dist(*args, **kwargs)


def collection(**options: Any) -> MetricCollection:
    kinds: dict[str, Any] = {
        "f1": MulticlassF1Score(VOCAB, average="macro"),
        "precision": MulticlassPrecision(VOCAB, average="macro"),
        "accuracy": MulticlassAccuracy(VOCAB, average="micro"),
    }
    return MetricCollection(kinds, **options)


class Measured(TinyModule):
    """Metrics of all kinds, in all stages."""

    def __init__(self) -> None:
        super().__init__(lr=0.1)
        self.mean, self.longest = MeanMetric(), nn.ModuleList([SumMetric()])
        self.own = OwnSync()
        self.collections = nn.ModuleDict(
            {
                "free": collection(prefix="free/"),
                "apart": collection(prefix="apart/", compute_groups=False),
                "named": collection(prefix="named/", compute_groups=[["f1", "precision"], ["accuracy"]]),
            }
        )
        for metric in metrics_of(self):
            metric.set_dtype(torch.float64)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.measure(batch)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.measure(batch)

    test_step = validation_step

    def measure(self, batch: Any) -> None:
        logits = self.model(batch["input_ids"]).detach()
        lengths, targets = batch["attention_mask"].sum(1).double(), shifted_labels(batch)
        kept = targets != -100
        self.mean(lengths)
        self.longest[0].update(lengths)
        self.own.update(lengths)
        self.log("mean", self.mean)
        self.log("tokens", self.longest[0], on_step=False, on_epoch=True)
        self.log("own", self.own, on_step=False, on_epoch=True)
        for child in self.collections.values():
            child.update(logits[kept], targets[kept])
            self.log_dict(child, on_step=False, on_epoch=True)
        self.log("loss", next_token_loss(logits, batch), sync_dist=True)


def settings_of(module: nn.Module) -> dict[str, Any]:
    """All attributes of metrics and collections that are not what they have added up; functions by name.

    Which metrics of a collection share a state is found out by its first update, in runs with packs never.
    """
    found: dict[str, Any] = {}
    for path, child in module.named_modules():
        if isinstance(child, (Metric, MetricCollection)):
            added_up = {*getattr(child, "_defaults", ()), "_computed", "_forward_cache", "_update_count", "_modules"}
            found_out = {"_groups", "_groups_checked", "_state_is_copy"}
            for name, value in vars(child).items():
                if name not in added_up | found_out:
                    found[f"{path}.{name}"] = getattr(value, "__qualname__", None) or repr(value)
    return found


def leave_world(port: int) -> None:
    """As in a notebook that goes on with another strategy; ranks meet again at another port."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    os.environ |= {"WORLD_SIZE": os.environ["TEST_WORLD_SIZE"], "MASTER_PORT": str(port)}


def numbers(values: Any) -> dict[str, float]:
    return {name: float(value) for name, value in values.items()}


def runs(strategy: dict[str, Any] | None, port: int = 0) -> dict[str, Any]:
    """Fit, test and validate; and with packs, then validate with plain DDP in the same process."""
    module, monitor = Measured(), PerformanceMonitor(2)
    run = trainer(strategy=strategy, callbacks=[monitor] if strategy else [])
    run.fit(module, loader(LENGTHS, 3), loader(VALIDATION, 2))
    settings = [settings_of(module)]
    for method in (run.test, run.validate):
        method(module, loader(VALIDATION, 2), verbose=False)
        settings.append(settings_of(module))
    found = {"settings": settings, "monitor": settings_of(nn.ModuleList(monitor._metrics))}
    weights = {name: p.detach().clone() for name, p in module.named_parameters()}
    return found | {"weights": weights, "ddp": after_ddp(module, port) if strategy else {}}


def after_ddp(module: L.LightningModule, port: int) -> dict[str, float]:
    leave_world(port)
    plain = L.Trainer(accelerator="cpu", devices=2, strategy="ddp", precision="64-true", logger=False, **QUIET)
    return numbers(plain.validate(module, loader(VALIDATION, 1), verbose=False)[0])


def validated(weights: dict[str, Tensor]) -> dict[str, float]:
    module = Measured()
    module.load_state_dict(weights, strict=False)
    return numbers(trainer(strategy=None).validate(module, loader(VALIDATION, 1), verbose=False)[0])


def assert_settings(ours: dict[str, Any], expected: dict[str, Any]) -> None:
    names = sorted(ours.keys() | expected.keys())
    assert {n: (ours.get(n), expected.get(n)) for n in names if ours.get(n) != expected.get(n)} == {}


def test_metrics_are_as_plain_lightning_leaves_them_and_right_in_a_run_of_another_kind(ranks: RankPool) -> None:
    (plain,) = ranks.run(runs, 1, None)
    results = ranks.run(runs, 2, DCP, _free_port())
    (expected,) = ranks.run(validated, 1, results[0]["weights"])
    expected.pop("loss")  # plain DDP takes the mean of the ranks' means
    assert len(expected) == 12
    for result in results:
        for ours, right in zip(result["settings"], plain["settings"], strict=True):
            assert_settings(ours, right)
        assert_settings(result["monitor"], plain["monitor"])
        assert {**result["ddp"], "loss": 0} == pytest.approx({**expected, "loss": 0}, rel=1e-9)


class Failing(Measured):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 1:
            raise ValueError("in the middle")
        return super().training_step(batch, batch_idx)


def failed() -> list[str]:
    module, monitor = Failing(), PerformanceMonitor(2)
    with pytest.raises(ValueError, match="in the middle"):
        trainer(strategy=DCP, callbacks=[monitor]).fit(module, loader(LENGTHS, 3))
    settings = settings_of(module), settings_of(nn.ModuleList(monitor._metrics))
    odd = [name for each in settings for name in each if name.endswith(("_sync_dist", "_outside_runs"))]
    return odd + [name for name, child in module.collections.items() if not child._enable_compute_groups]


def test_a_run_that_fails_lets_go_of_metrics(ranks: RankPool) -> None:
    assert ranks.run(failed, 2) == [["apart"]] * 2  # the user's own choice


def set_up_and_released() -> list[bool]:
    """In the middle of a run metrics gather by its group; afterwards nothing holds it."""
    dist.init_process_group("gloo")
    module = Measured()
    before = settings_of(module)
    for _ in range(2):
        with metrics_of_batch(module, dist.group.WORLD):
            pass
    free: Any = module.collections["free"]
    during = isinstance(vars(module.mean)["_sync_dist"], StateSync) and not free._enable_compute_groups
    release_metrics(module)
    release_metrics(module)
    gc.collect()
    held = any(isinstance(each, StateSync) for each in gc.get_objects())
    return [during, settings_of(module) == before, not held, free._enable_compute_groups is True]


def test_release_undoes_what_batches_set_up(ranks: RankPool) -> None:
    assert ranks.run(set_up_and_released, 1) == [[True] * 4]


def test_a_metric_that_gathers_in_its_own_way_keeps_it() -> None:
    metrics: Any = [MeanMetric(), OwnSync()]
    vars(metrics[0])["_sync_dist"] = print
    for metric in metrics:
        StateSync.install(metric, None)  # type: ignore[arg-type]
        StateSync.remove(metric)
    assert metrics[0]._sync_dist is print
    assert "_sync_dist" not in vars(metrics[1])
