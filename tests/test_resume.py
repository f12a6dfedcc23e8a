"""Resuming: bit for bit what an uninterrupted run does, also in the middle of an epoch."""

from __future__ import annotations

import gc
import os
from itertools import chain
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import RandomSampler

from lightning_dcp.data import EpochSampler
from tests.support.ranks import RankPool
from tests.support.training import TinyModule, loader, trainer

LENGTHS = (60, 3, 30, 7, 1, 12, 5, 29, 2, 61, 16, 9, 13, 40, 4, 4, 8, 30, 11, 6)


class Reads(L.Callback):
    """Which samples each step read, by their lengths and first tokens."""

    def __init__(self) -> None:
        self.batches: list[list[tuple[int, int]]] = []

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, index: int) -> None:
        self.batches.append(
            [(int(m.sum()), int(ids[0])) for ids, m in zip(batch["input_ids"], batch["attention_mask"], strict=True)]
        )


class WithSchedule(TinyModule):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)}


def train(directory: str, steps: int, resume_from: str | None, batch_size: int, workers: int = 0) -> dict[str, Any]:
    if workers:
        gc.collect()  # process groups of earlier runs must not be left for a forked worker to free
    reads = Reads()
    run = trainer(
        strategy={"max_seqlen_per_dp_cp_rank": 64 // int(os.environ["TEST_WORLD_SIZE"])},
        precision="32-true",
        max_epochs=None,
        max_steps=steps,
        enable_checkpointing=True,
        callbacks=[reads, ModelCheckpoint(directory, every_n_train_steps=1, save_top_k=-1, filename="{step}")],
    )
    module = WithSchedule()
    data = loader(LENGTHS, batch_size, shuffle=True, num_workers=workers, persistent_workers=workers > 0)
    run.fit(module, data, ckpt_path=resume_from)
    return {
        "weights": {name: p.detach().clone() for name, p in module.named_parameters()},
        "optimizer": module.optimizers().state_dict(),
        "reads": reads.batches,
        "lr": run.optimizers[0].param_groups[0]["lr"],
        "step": run.global_step,
    }


@pytest.mark.parametrize(
    ("batch_size", "workers"),
    [
        (3, 0),
        pytest.param(3, 2, marks=pytest.mark.slow),
        pytest.param(5, 0, marks=pytest.mark.slow),
        pytest.param(10, 0, marks=pytest.mark.slow),
    ],
)
def test_resumed_steps_equal_uninterrupted_ones(ranks: RankPool, tmp_path: Path, batch_size: int, workers: int) -> None:
    """Twenty samples: a batch of 3 resumes in the first epoch, of 5 too, of 10 in the middle of the second."""
    straight = ranks.run(train, 4, str(tmp_path / "a"), 6, None, batch_size, workers)
    ranks.run(train, 4, str(tmp_path / "b"), 3, None, batch_size, workers)
    ranks.close()  # the resumed half runs in new processes
    resumed = ranks.run(train, 4, str(tmp_path / "b"), 6, str(tmp_path / "b" / "step=3.ckpt"), batch_size, workers)
    for whole, half in zip(straight, resumed, strict=True):
        assert half["reads"] == whole["reads"][3:]
        assert half["step"] == whole["step"] == 6
        assert half["lr"] == whole["lr"]
        assert _equal(half["weights"], whole["weights"])
        assert _equal(half["optimizer"]["state"], whole["optimizer"]["state"])


def _equal(ours: Any, expected: Any) -> bool:
    if isinstance(expected, dict):
        return ours.keys() == expected.keys() and all(_equal(ours[key], value) for key, value in expected.items())
    return torch.equal(ours, expected)


def test_epochs_are_shuffled_differently_and_ranks_alike(ranks: RankPool, tmp_path: Path) -> None:
    results = ranks.run(train, 2, str(tmp_path), 8, None, 5)
    reads = results[0]["reads"]
    assert results[1]["reads"] == reads
    assert sorted(chain(*reads[:4])) == sorted(chain(*reads[4:]))
    assert reads[:4] != reads[4:]


def count_set_epoch() -> list[int]:
    epochs: list[int] = []

    class Counting(EpochSampler):
        def set_epoch(self, epoch: int) -> None:
            epochs.append(epoch)
            super().set_epoch(epoch)

    data = loader(LENGTHS, 10, sampler=Counting(LENGTHS))
    run = trainer(strategy={"max_seqlen_per_dp_cp_rank": 32}, max_epochs=3)
    run.fit(TinyModule(lr=0.1), data)
    return epochs


def test_the_sampler_learns_of_each_epoch_once(ranks: RankPool) -> None:
    assert ranks.run(count_set_epoch, 2) == [[0, 1, 2]] * 2


def unseeded_order() -> None:
    generator = torch.Generator()
    generator.seed()
    data = loader(LENGTHS, 10, sampler=RandomSampler(range(len(LENGTHS)), generator=generator))
    trainer(strategy={"max_seqlen_per_dp_cp_rank": 32}).fit(TinyModule(), data)


def test_ranks_that_read_different_batches_are_stopped(ranks: RankPool) -> None:
    for ok, text in ranks.run_all(unseeded_order, 2):
        assert not ok
        assert "PlanMismatchError" in text
        assert "Every rank must read the same batch" in text


def test_a_checkpoint_loads_without_the_strategy(ranks: RankPool, tmp_path: Path) -> None:
    trained = ranks.run(train, 4, str(tmp_path), 2, None, 5)[0]
    module = WithSchedule.load_from_checkpoint(tmp_path / "step=2.ckpt")
    assert _equal({name: p.detach() for name, p in module.named_parameters()}, trained["weights"])
