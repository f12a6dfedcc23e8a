"""Hugging Face models trained by Lightning: by one process, and under the strategy."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as L
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_dcp.batch.labels import shifted_labels
from tests.models.families import build
from tests.models.oracle import without_casts
from tests.support.training import Recorder, assert_same, loader, trainer

# Two batches of six. At 16 tokens a rank, 60 needs four ranks of four, 30 needs two, 7 needs one.
LENGTHS = (60, 3, 30, 7, 1, 12, 5, 29, 2, 61, 16, 9)
LIMIT = {1: 64, 2: 32, 4: 16, 6: 16}

Step = Callable[[nn.Module, Any], Tensor]


def mask_of(batch: Any) -> dict[str, Tensor]:
    """The mask of a padded batch; packed ones have none."""
    return {"attention_mask": batch["attention_mask"]} if "attention_mask" in batch else {}


def own_loss(model: nn.Module, batch: Any) -> Tensor:
    """The loss that the model computes, given labels."""
    return model(input_ids=batch["input_ids"], labels=batch["labels"], **mask_of(batch)).loss


def users_loss(model: nn.Module, batch: Any) -> Tensor:
    """The user's own loss of the model's logits."""
    return loss_of_logits(model(batch["input_ids"], **mask_of(batch)).logits, batch)


def loss_of_logits(logits: Tensor, batch: Any) -> Tensor:
    """Cross-entropy over targets, in the precision of the logits."""
    targets = shifted_labels(batch)
    if logits.is_nested:
        return F.cross_entropy(logits.values(), targets.values())
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def as_it_is(model: nn.Module) -> nn.Module:
    """The model itself."""
    return model


@dataclass(frozen=True)
class Arm:
    """One model of a module, and how it is used.

    Attributes:
        family: of the model.
        step: its loss.
        prepare: what becomes of the model before it is put into the module.
        changes: of its configuration.
    """

    family: str = "llama"
    step: Step = own_loss
    prepare: Callable[[Any], nn.Module] = as_it_is
    changes: Mapping[str, Any] = field(default_factory=dict)

    def build(self) -> nn.Module:
        return self.prepare(build(self.family, **self.changes))


class Arms(L.LightningModule):
    """Several models side by side; the loss is the sum of theirs, so none has to do with another.

    Setting a run up costs much more than training a tiny model, hence many models in one run.
    """

    def __init__(self, arms: Mapping[str, Arm], lr: float = 1.0, log: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self.arms, self.lr, self.log_options = dict(arms), lr, dict(log or {})
        self.models = nn.ModuleDict({name: arm.build() for name, arm in arms.items()})

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        losses = {name: arm.step(self.models[name], batch) for name, arm in self.arms.items()}
        self.log_dict(losses, on_step=True, on_epoch=True, **self.log_options)
        return torch.stack([loss.double() for loss in losses.values()]).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=self.lr)


class Steps(Recorder):
    """Keeps what was logged at each step, too."""

    def __init__(self) -> None:
        super().__init__()
        self.logged: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, *_: Any) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, *_)
        self.logged.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def train(
    module: L.LightningModule,
    *,
    strategy: dict[str, Any] | None,
    fmt: str = "padded",
    batches: Any = None,
    lengths: Sequence[int] = LENGTHS,
    precision: str = "64-true",
    exact: bool = True,
    **options: Any,
) -> dict[str, Any]:
    """Train, and return all that has to agree.

    Args:
        module: what is trained.
        strategy: arguments of the strategy; None for plain Lightning.
        fmt: the batches' format.
        batches: a loader in their place.
        lengths: of the samples.
        precision: as in Lightning.
        exact: without transformers' casts to float32.
        options: of the trainer.
    """
    os.environ["WORLD_SIZE"] = os.environ["TEST_WORLD_SIZE"]  # Lightning forgets it at the end of a run
    recorder = Steps()
    run = trainer(strategy=strategy, precision=precision, callbacks=[recorder], **options)
    with without_casts() if exact else nullcontext():
        run.fit(module, loader(lengths, 6, fmt) if batches is None else batches)
    return {
        "losses": recorder.losses,
        "gradients": [_arrays(step) for step in recorder.gradients],
        "weights": _arrays(dict(module.named_parameters())),
        "logged": {name: float(value) for name, value in run.callback_metrics.items()},
        "steps": recorder.logged,
        "cp_sizes": recorder.cp_sizes,
    }


def _arrays(tensors: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    """For the way to another process: a tensor takes a file descriptor along, and there are thousands."""
    return {name: tensor.detach().numpy().copy() for name, tensor in tensors.items()}


def train_arms(
    arms: Mapping[str, Arm], *, lr: float = 1.0, log: Mapping[str, Any] | None = None, **options: Any
) -> dict[str, Any]:
    """A job: train a module of these arms."""
    return train(Arms(arms, lr, log), **options)


def once(run: Callable[..., Any]) -> Callable[..., Any]:
    """Like ``functools.cache``, but a run that fails is not made again for the next test either."""
    outcomes: dict[Any, Any] = {}

    def again(*args: Any, **kwargs: Any) -> Any:
        key = (args, tuple(sorted(kwargs.items())))
        if key not in outcomes:
            try:
                outcomes[key] = run(*args, **kwargs)
            except AssertionError as error:  # a failure of ranks
                outcomes[key] = error
        if isinstance(outcomes[key], AssertionError):
            raise AssertionError(str(outcomes[key])[-4000:])
        return outcomes[key]

    return again


def on_ranks(world: int, **options: Any) -> dict[str, Any]:
    """Arguments of a strategy on so many ranks, with mixed CP sizes."""
    return {"max_seqlen_per_dp_cp_rank": LIMIT[world]} | options


def assert_arm(name: str, ours: Sequence[dict[str, Any]], expected: dict[str, Any], tolerance: float = 1e-9) -> None:
    """On every rank, one arm's losses, gradients, weights and logged values are those of one process."""
    right = _part(expected, name)
    for result in ours:
        assert_same(_part(result, name), right, tolerance)
        assert result["losses"] == ours[0]["losses"]


def _part(result: dict[str, Any], name: str) -> dict[str, Any]:
    prefix = f"models.{name}."

    def own(values: Mapping[str, Any]) -> dict[str, Any]:
        return {key: torch.from_numpy(value) for key, value in values.items() if key.startswith(prefix)}

    return {
        "losses": [step[f"{name}_step"] for step in result["steps"]],
        "gradients": [own(step) for step in result["gradients"]],
        "weights": own(result["weights"]),
        "logged": {key: result["logged"][key] for key in (f"{name}_step", f"{name}_epoch")},
    }
