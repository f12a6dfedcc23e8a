"""A tiny model, real ragged data, and runs of one process and of many to compare."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_dcp import DCPStrategy, Decoder, next_token_loss
from lightning_dcp.data import COLLATORS

VOCAB = 17


class RaggedTokens(Dataset):
    """Random tokens with given lengths; some tokens are no targets."""

    def __init__(self, lengths: Sequence[int], seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.lengths = list(lengths)
        self.samples = []
        for i, n in enumerate(lengths):
            ids = torch.randint(1, VOCAB, (n,), generator=generator)
            labels = ids.masked_fill(torch.rand(n, generator=generator) < 0.2, -100)
            self.samples.append({"input_ids": ids, "labels": labels, "index": i})

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return dict(self.samples[index])


class TinyModule(L.LightningModule):
    """An ordinary module; it knows nothing of context parallelism."""

    def __init__(
        self, optimizer: str = "sgd", lr: float = 1.0, seed: int = 1, kv_heads: int = 1, tie: bool = True
    ) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.model = Decoder(
            VOCAB,
            hidden_size=16,
            num_layers=2,
            num_heads=2,
            num_kv_heads=kv_heads,
            ffn_hidden_size=24,
            tie_embeddings=tie,
        )
        for parameter in self.model.parameters():
            if parameter.dim() > 1:  # larger weights than a fresh model's, so that attention is far from uniform
                nn.init.normal_(parameter, std=0.3)
        self.optimizer, self.lr = optimizer, lr

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = next_token_loss(self.model(batch["input_ids"]), batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", next_token_loss(self.model(batch["input_ids"]), batch))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model(batch["input_ids"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.optimizer == "adamw":
            return torch.optim.AdamW(self.parameters(), lr=self.lr)
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Recorder(L.Callback):
    """Keeps losses, gradients at each optimizer step, and the plans."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.gradients: list[dict[str, Tensor]] = []
        self.cp_sizes: list[list[int]] = []

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        self.gradients.append({n: p.grad.clone() for n, p in pl_module.named_parameters() if p.grad is not None})

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]))
        for callback in trainer.callbacks:
            if getattr(callback, "scheduled", None) is not None:
                self.cp_sizes.append([pack.cp_size for pack in callback.scheduled.plan.packs()])


def loader(lengths: Sequence[int], batch_size: int, fmt: str = "padded", **options: Any) -> DataLoader:
    """A loader over random tokens in one of the batch formats."""
    return DataLoader(RaggedTokens(lengths), batch_size=batch_size, collate_fn=COLLATORS[fmt], **options)


def trainer(*, strategy: dict[str, Any] | None, precision: str = "64-true", **options: Any) -> L.Trainer:
    """A quiet trainer; ``strategy=None`` is plain Lightning on one process."""
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": int(os.environ["TEST_WORLD_SIZE"]),
        "precision": precision,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "max_epochs": 1,
    }
    settings |= options
    if strategy is not None:
        settings["strategy"] = DCPStrategy(**strategy)
    return L.Trainer(**settings)


def fit(
    lengths: Sequence[int],
    batch_size: int,
    *,
    strategy: dict[str, Any] | None,
    fmt: str = "padded",
    precision: str = "64-true",
    module: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Train, and return all that has to agree: losses, gradients, weights, logged values."""
    recorder = Recorder()
    model = TinyModule(**(module or {}))
    run = trainer(strategy=strategy, precision=precision, callbacks=[recorder], **options)
    run.fit(model, loader(lengths, batch_size, fmt))
    return {
        "losses": recorder.losses,
        "gradients": recorder.gradients,
        "weights": {name: p.detach().clone() for name, p in model.named_parameters()},
        "logged": {name: float(value) for name, value in run.callback_metrics.items()},
        "cp_sizes": recorder.cp_sizes,
        "reductions": getattr(run.strategy, "gradient_reductions", None),
    }


def assert_same(ours: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    """Losses, every gradient, every weight and every logged value agree; relative to the largest entry over 1."""
    assert len(ours["losses"]) == len(expected["losses"]) > 0
    torch.testing.assert_close(
        torch.tensor(ours["losses"]), torch.tensor(expected["losses"]), rtol=tolerance, atol=tolerance
    )
    assert len(ours["gradients"]) == len(expected["gradients"]) > 0
    for own, right in zip(ours["gradients"], expected["gradients"], strict=True):
        _assert_tensors(own, right, tolerance)
    _assert_tensors(ours["weights"], expected["weights"], tolerance)
    assert ours["logged"].keys() == expected["logged"].keys()
    for name, value in expected["logged"].items():
        assert abs(ours["logged"][name] - value) <= tolerance * max(1.0, abs(value)), name


def _assert_tensors(ours: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert ours.keys() == expected.keys()
    for name, right in expected.items():
        error = (ours[name] - right).abs().max()
        assert error <= tolerance * max(1.0, float(right.abs().max())), f"{name}: off by {error}"
