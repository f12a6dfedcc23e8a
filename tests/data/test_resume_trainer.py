"""The loader in Lightning's own trainer: a run resumed from any of its checkpoints reads what it would have read."""

from functools import partial

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.utils.data import DataLoader

from lightning_dcp.data import Document, EpochSampler, ResumableLoader, TokenDataset, collate_packed

DOCUMENTS = 11
BATCHES = 4  # of 3 samples, the last one of 2
EPOCHS = 3

SAVING = {
    "step": {"every_n_train_steps": 1},
    "epoch end": {"save_on_train_epoch_end": True},
    "validation end": {"save_on_train_epoch_end": False},
}


class Recorder(L.LightningModule):
    """Remembers which samples each training step saw, by epoch."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen = []

    def training_step(self, batch, batch_idx):
        self.seen.append((self.trainer.current_epoch, batch_idx, batch.sample_ids))
        return self.layer(batch.input_ids[0, :1, None].float() / 256).sum()

    def validation_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Resuming(SingleDeviceStrategy):
    """Wraps loaders as a strategy does, after Lightning is done with the sampler."""

    limit = 1.0
    ahead = False

    def process_dataloader(self, dataloader):
        loader = ResumableLoader(dataloader, limit=self.limit)
        loader.announce = (lambda batch: None) if self.ahead else None
        return loader


@pytest.fixture(params=[False, True], ids=["", "ahead"])
def ahead(request, monkeypatch):
    """Without and with reading one batch ahead."""
    monkeypatch.setattr(Resuming, "ahead", request.param)


def load(index):
    return b"x" * (index + 1)


def make_loader(num_workers=0, persistent_workers=False):
    documents = [Document(f"d{i}", i + 1, partial(load, i)) for i in range(DOCUMENTS)]
    dataset = TokenDataset(documents, max_length=64)
    return DataLoader(
        dataset,
        batch_size=3,
        sampler=EpochSampler(dataset, seed=1),
        collate_fn=collate_packed,
        num_workers=num_workers,
        persistent_workers=persistent_workers,
    )


def fit(folder, *, ckpt_path=None, limit=1.0, when="step", every=None, loader=None, **options):
    strategy = Resuming(device="cpu")
    strategy.limit = limit
    saving = SAVING[when] if every is None else {"every_n_train_steps": every}
    checkpoint = ModelCheckpoint(folder, filename="{step}", save_top_k=-1, **saving)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        limit_train_batches=limit,
        callbacks=[checkpoint] if ckpt_path is None else [],
        enable_checkpointing=ckpt_path is None,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        limit_val_batches=1 if when == "validation end" else 0,
        **({"max_epochs": EPOCHS} | options),
    )
    model = Recorder()
    trainer.fit(model, loader or make_loader(), make_loader(), ckpt_path=ckpt_path, weights_only=False)
    return model.seen


def ids(seen):
    return [sample_ids for _, _, sample_ids in seen]


def check_every_checkpoint(folder, **options):
    whole = fit(folder, **options)
    checkpoints = {int(path.stem.split("=")[1]): path for path in folder.glob("step=*.ckpt")}
    assert len(checkpoints) > 1
    for step, path in sorted(checkpoints.items()):
        resumed = fit(folder, ckpt_path=path, **options)
        assert ids(resumed) == ids(whole)[step:], f"resumed after step {step}"
    return whole, checkpoints


def test_uninterrupted_epochs_cover_the_data_in_different_orders(tmp_path):
    whole = ids(fit(tmp_path, every=100))
    by_epoch = [[i for batch in whole[e * BATCHES : (e + 1) * BATCHES] for i in batch] for e in range(EPOCHS)]
    assert all(sorted(order) == list(range(DOCUMENTS)) for order in by_epoch)
    assert len({tuple(order) for order in by_epoch}) == EPOCHS


def test_after_every_step(tmp_path, ahead):
    _, checkpoints = check_every_checkpoint(tmp_path)
    assert sorted(checkpoints) == list(range(1, EPOCHS * BATCHES + 1))


def test_after_every_step_counted_in_steps(tmp_path, ahead):
    check_every_checkpoint(tmp_path, max_epochs=-1, max_steps=10)


def test_at_the_end_of_epochs(tmp_path):
    check_every_checkpoint(tmp_path, when="epoch end")


def test_at_the_end_of_epochs_counted_in_steps_is_as_with_any_loader(tmp_path, monkeypatch):
    # Lightning 2.6 itself counts on within the finished epoch here, with any loader: one batch, then the next epoch.
    options = {"when": "epoch end", "max_epochs": -1, "max_steps": 10}
    whole = fit(tmp_path, **options)
    resumed = fit(tmp_path, ckpt_path=tmp_path / "step=4.ckpt", **options)
    assert ids(resumed)[0] == ids(whole)[4]
    monkeypatch.setattr(Resuming, "process_dataloader", lambda self, dataloader: dataloader)
    plain = tmp_path / "plain"
    fit(plain, **options)
    assert fit(plain, ckpt_path=plain / "step=4.ckpt", **options) == resumed


@pytest.mark.parametrize("steps", [{}, {"max_epochs": -1, "max_steps": 10}], ids=["epochs", "steps"])
def test_after_validation_within_the_epoch(tmp_path, steps, ahead):
    _, checkpoints = check_every_checkpoint(tmp_path, when="validation end", val_check_interval=2, **steps)
    assert {2, 4, 6} <= set(checkpoints)


@pytest.mark.parametrize("steps", [{}, {"max_epochs": -1, "max_steps": 7}], ids=["epochs", "steps"])
def test_with_a_limited_epoch(tmp_path, steps, ahead):
    check_every_checkpoint(tmp_path, limit=3, **steps)


@pytest.mark.parametrize("persistent_workers", [False, True])
@pytest.mark.parametrize("step", [2, 6], ids=["epoch 0", "epoch 1"])
def test_with_workers(tmp_path, persistent_workers, step, ahead):
    whole = fit(tmp_path, every=step)
    loader = make_loader(num_workers=2, persistent_workers=persistent_workers)
    resumed = fit(tmp_path, ckpt_path=tmp_path / f"step={step}.ckpt", loader=loader)
    assert resumed == whole[step:]
