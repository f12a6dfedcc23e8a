"""What a strategy makes of a user's loader: the same batches on all ranks, resumable, and read one batch ahead."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_dcp.data.ahead import AheadLoader, Announce, epoch_batches
from lightning_dcp.data.resumable import ResumableLoader
from lightning_dcp.data.seeded import with_seeded_order


def prepare_loader(loader: Any, trainer: Trainer, announce: Announce | None) -> Any:
    """A loader as the trainer shall use it.

    One over a map-style data set gets an order that is the same on all ranks, and in training can be resumed in the
    middle of an epoch. Each batch is handed out after the next one of the epoch has been read, except by a loader of
    another kind that has a state of its own, which would count a batch that is only read ahead.

    Args:
        loader: what the user gave.
        trainer: whose limits say how far an epoch goes.
        announce: told of each batch once it is read; ``None``: nothing is read ahead.
    """
    if isinstance(loader, AheadLoader):  # a CombinedLoader of the user's keeps what it was given in an earlier run
        loader = loader.wrapped
    if isinstance(loader, DataLoader) and is_map_style(loader):
        loader = with_seeded_order(loader, trainer.state.stage)
        if trainer.training:
            loader = ResumableLoader(loader, limit=trainer.limit_train_batches)
    if isinstance(loader, ResumableLoader):
        loader.announce = announce
        return loader
    if announce is None or _has_state(loader):
        return loader
    return AheadLoader(loader, announce, lambda wrapped: _batches_of_run(wrapped, trainer))


def is_map_style(loader: DataLoader[Any]) -> bool:
    """Whether a loader's samples are reached by index, so that reading can go on in the middle of an epoch."""
    dataset: Dataset[Any] = loader.dataset
    return not isinstance(dataset, IterableDataset) and loader.batch_sampler is not None


def _has_state(loader: object) -> bool:
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


def _batches_of_run(loader: object, trainer: Trainer) -> float:
    """Batches that the loop under way takes of a loader."""
    stage: Any = trainer.state.stage
    batches = epoch_batches(loader, getattr(trainer, f"limit_{stage.dataloader_prefix}_batches"))
    return min(batches, trainer.num_sanity_val_steps) if trainer.sanity_checking else batches
