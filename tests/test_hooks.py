"""Hooks and callbacks run once a batch, in the order and with the values of one process of plain Lightning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    StochasticWeightAveraging,
    WeightAveraging,
)
from torch import Tensor

from lightning_dcp.errors import ConfigurationError
from tests.support.ranks import RankPool
from tests.support.training import TinyModule, loader, trainer

LENGTHS = (30, 3, 30, 7, 1, 12, 5, 29, 2, 31, 16, 9)
VALIDATION = (9, 31, 12)
DCP = {"max_seqlen_per_dp_cp_rank": 16}

HOOKS = [
    name
    for name in dir(L.LightningModule)
    if name.startswith("on_") or name in ("optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping")
    or name in ("lr_scheduler_step", "transfer_batch_to_device", "configure_optimizers", "setup", "teardown")
    or name in ("prepare_data", "configure_callbacks", "configure_model")
]  # fmt: skip
CALLBACK_HOOKS = [name for name in dir(L.Callback) if name.startswith("on_") or name in ("setup", "teardown")]


def telling(base: type, names: list[str], who: str) -> type:
    """A subclass that notes each call of its hooks in ``self.told``, then does what the base class does."""

    def teller(name: str) -> Callable[..., Any]:
        own = getattr(base, name)

        def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
            self.told.append(f"{who}.{name}{_numbers(args)}")
            return own(self, *args, **kwargs)

        return hook

    return type(f"Telling{base.__name__}", (base,), {name: teller(name) for name in names if hasattr(base, name)})


def _numbers(args: tuple[Any, ...]) -> list[Any]:
    """Indices of batches, loaders and epochs, and names of stages, among the arguments."""
    return [arg for arg in args if isinstance(arg, (int, str))]


class Stepping(TinyModule):
    """Counts batches of which the user's code is told."""

    def __init__(self, told: list[str], **options: Any) -> None:
        super().__init__(**options)
        self.told = told

    test_step = TinyModule.validation_step

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def told(strategy: dict[str, Any] | None) -> list[str]:
    calls: list[str] = []
    module: Any = telling(Stepping, HOOKS, "module")(calls, lr=0.1)
    callback: Any = telling(L.Callback, CALLBACK_HOOKS, "callback")()
    callback.told = calls
    run = trainer(
        strategy=strategy,
        max_epochs=2,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        val_check_interval=2,
        num_sanity_val_steps=1,
        callbacks=[callback],
    )
    run.fit(module, loader(LENGTHS, 3), loader(VALIDATION, 2))
    for method in (run.validate, run.test, run.predict):
        method(module, loader(VALIDATION, 2), **({} if method == run.predict else {"verbose": False}))
    return calls


def test_hooks_run_as_often_and_in_the_order_of_one_process(ranks: RankPool) -> None:
    expected = ranks.run(told, 1, None)[0]
    assert len(expected) > 200
    assert {"module.on_before_backward[]", "callback.on_before_zero_grad[]", "module.on_train_batch_end[3]"} <= set(
        expected
    )
    for rank, ours in enumerate(ranks.run(told, 2, DCP)):
        if rank > 0:  # Lightning prepares data on one rank of a node
            expected = [call for call in expected if call != "module.prepare_data[]"]
        for i, (own, right) in enumerate(zip(ours, expected, strict=False)):
            assert own == right, (i, ours[max(0, i - 5) : i + 5], expected[max(0, i - 5) : i + 5])
        assert len(ours) == len(expected)


class Looking(L.Callback):
    """Keeps what hooks get to see: losses, outputs, gradients."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, Any]] = []

    def on_before_backward(self, trainer: Any, module: Any, loss: Tensor) -> None:
        self.seen.append(("loss", loss.detach().clone()))

    def on_after_backward(self, trainer: Any, module: Any) -> None:
        self.see_gradients("after backward", trainer, module)

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.see_gradients("before the step", trainer, module)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        self.seen.append(("outputs", {key: value.detach().clone() for key, value in outputs.items()}))
        self.seen.append(("batch", batch["input_ids"].clone()))
        self.seen.append(("steps", torch.tensor([trainer.global_step, trainer.fit_loop.total_batch_idx])))

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, *_: Any) -> None:
        self.seen.append(("outputs", outputs))

    def see_gradients(self, name: str, trainer: Any, module: Any) -> None:
        # between the optimizer's steps the ranks' gradients are not added up yet
        if not trainer.fit_loop._should_accumulate():
            gradients = {n: None if p.grad is None else p.grad.clone() for n, p in module.named_parameters()}
            self.seen.append((name, gradients))


class Returning(TinyModule):
    """Returns more than a loss, in training and validation."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return {"loss": loss, "lengths": batch["attention_mask"].sum(1), "double": loss.detach() * 2}

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        super().validation_step(batch, batch_idx)
        return {"lengths": batch["attention_mask"].sum(1)}


def seen(strategy: dict[str, Any] | None, accumulate: int) -> list[tuple[str, Any]]:
    looking = Looking()
    run = trainer(strategy=strategy, accumulate_grad_batches=accumulate, max_epochs=2, callbacks=[looking])
    run.fit(Returning(lr=0.3), loader(LENGTHS, 3), loader(VALIDATION, 2))
    return looking.seen


@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_hooks_see_the_values_of_one_process(ranks: RankPool, accumulate: int) -> None:
    expected = ranks.run(seen, 1, None, accumulate)[0]
    assert {name for name, _ in expected} >= {"loss", "after backward", "before the step", "outputs"}
    for ours in ranks.run(seen, 2, DCP, accumulate):
        assert_seen(ours, expected)


def assert_seen(ours: list[tuple[str, Any]], expected: list[tuple[str, Any]]) -> None:
    assert [name for name, _ in ours] == [name for name, _ in expected]
    for i, ((name, own), (_, right)) in enumerate(zip(ours, expected, strict=True)):
        assert (own is None) == (right is None), (i, name)
        if isinstance(right, dict):
            assert [key for key in right if right[key] is None] == [key for key in own if own[key] is None], (i, name)
            own, right = ({key: value for key, value in x.items() if value is not None} for x in (own, right))
        torch.testing.assert_close(own, right, rtol=1e-9, atol=1e-9)


class BeforeZeroGrad(L.Callback):
    """Keeps the gradients of the step before, which Lightning zeroes only after ``training_step``."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, Any]] = []

    def on_before_zero_grad(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.seen.append(("", {n: None if p.grad is None else p.grad.clone() for n, p in module.named_parameters()}))


def before_zero_grad(strategy: dict[str, Any] | None) -> list[tuple[str, Any]]:
    looking = BeforeZeroGrad()
    trainer(strategy=strategy, accumulate_grad_batches=2, callbacks=[looking]).fit(
        Returning(lr=0.3), loader(LENGTHS, 3)
    )
    return looking.seen


def test_on_before_zero_grad_sees_the_gradients_of_the_step_before(ranks: RankPool) -> None:
    expected = ranks.run(before_zero_grad, 1, None)[0]
    assert set(expected[0][1].values()) == {None}
    for ours in ranks.run(before_zero_grad, 2, DCP):
        assert_seen(ours, expected)


# ------------------------------------------------------------------ callbacks of Lightning


class EpochSteps(Stepping):
    """Steps its scheduler once an epoch."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


class Counting(L.Callback):
    """Keeps steps, batches and learning rates, and when validation ran."""

    def __init__(self) -> None:
        self.counts: list[list[float]] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        self.counts.append(
            [trainer.global_step, trainer.fit_loop.total_batch_idx, trainer.accumulate_grad_batches, rate]
        )

    def on_validation_start(self, trainer: Any, *_: Any) -> None:
        self.counts.append([-1.0, trainer.global_step])


ACCUMULATION = {0: 1, 1: 3, 2: 2}
RUNS: dict[str, tuple[type[TinyModule], Callable[[], list[L.Callback]], dict[str, Any]]] = {
    "accumulation schedule": (
        TinyModule,
        lambda: [GradientAccumulationScheduler(dict(ACCUMULATION))],
        {"max_epochs": 3},
    ),
    "stochastic weight averaging": (
        EpochSteps,
        lambda: [StochasticWeightAveraging(0.05, swa_epoch_start=1, annealing_epochs=2)],
        {"max_epochs": 4},
    ),
    "equal averaging": (TinyModule, lambda: [WeightAveraging()], {"max_epochs": 2}),
    "moving average": (
        TinyModule,
        lambda: [EMAWeightAveraging(decay=0.7, update_every_n_steps=2, update_starting_at_step=1)],
        {"max_epochs": 3, "accumulate_grad_batches": 2},
    ),
    "rate by epoch": (EpochSteps, list, {"max_epochs": 3, "val_check_interval": 2}),
    "rate by step": (Stepping, list, {"max_epochs": 2, "accumulate_grad_batches": 3}),
    "steps": (
        Stepping,
        list,
        {"max_epochs": -1, "max_steps": 6, "val_check_interval": 3, "check_val_every_n_epoch": None},
    ),
    "batches": (Stepping, list, {"max_epochs": 2, "limit_train_batches": 3, "limit_val_batches": 1}),
    "share of the batches": (Stepping, list, {"limit_train_batches": 0.5, "val_check_interval": 0.5}),
}


def trained(name: str, strategy: dict[str, Any] | None) -> dict[str, Any]:
    kind, callbacks, options = RUNS[name]
    counting = Counting()
    module = kind([], lr=0.2) if issubclass(kind, Stepping) else kind(lr=0.2)
    run = trainer(strategy=strategy, callbacks=[counting, *callbacks()], **options)
    run.fit(module, loader(LENGTHS, 3), loader(VALIDATION, 2))
    logged = {key: float(value) for key, value in run.callback_metrics.items()}
    weights = {key: value.detach().clone() for key, value in module.state_dict().items()}
    return {
        "weights": weights,
        "logged": logged,
        "counts": counting.counts,
        "end": [run.global_step, run.current_epoch],
    }


NEAR_REPEATS = ("equal averaging", "rate by epoch", "rate by step", "batches", "share of the batches")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in NEAR_REPEATS)) for n in RUNS])
def test_callbacks_and_counts_train_the_weights_of_one_process(ranks: RankPool, name: str) -> None:
    expected = ranks.run(trained, 1, name, None)[0]
    assert len(expected["counts"]) > 3
    for ours in ranks.run(trained, 2, name, DCP):
        assert ours["end"] == expected["end"]
        assert ours["counts"] == [pytest.approx(count) for count in expected["counts"]]
        torch.testing.assert_close(ours["weights"], expected["weights"], rtol=1e-9, atol=1e-9)
        assert ours["logged"] == pytest.approx(expected["logged"], rel=1e-9)


class TwoOptimizers(TinyModule):
    """Takes its optimizer steps itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.model.parameters(), lr=rate) for rate in (0.1, 0.2)]


def refusal() -> str:
    with pytest.raises(ConfigurationError) as caught:
        trainer(strategy=DCP).fit(TwoOptimizers(), loader(LENGTHS, 3))
    return str(caught.value)


def test_manual_optimization_is_refused_with_a_remedy(ranks: RankPool) -> None:
    message = ranks.run(refusal, 1)[0]
    assert "manual optimization in TwoOptimizers" in message
    assert "remove `self.automatic_optimization = False`" in message
