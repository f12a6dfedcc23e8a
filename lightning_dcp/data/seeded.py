"""Shuffling that is the same on every rank, for loaders that were made with ``shuffle=True``."""

from __future__ import annotations

import os
from typing import Any

from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.data import _update_dataloader
from torch.utils.data import DataLoader, RandomSampler

from lightning_dcp.data.sampler import EpochSampler


def with_seeded_order(loader: DataLoader[Any], stage: RunningStage | None) -> DataLoader[Any]:
    """The loader with an :class:`EpochSampler` in the place of a plain ``RandomSampler``.

    A ``RandomSampler`` draws its order from torch's global random state: ranks need not agree on it, and no checkpoint
    holds it. The seed is that of ``seed_everything``, or 0, as for Lightning's own distributed sampler. Other samplers,
    also a ``RandomSampler`` with a generator or with replacement, are left as they are.
    """
    sampler = loader.sampler
    if not isinstance(sampler, RandomSampler) or not _is_plain(sampler):
        return loader
    if getattr(loader.batch_sampler, "sampler", sampler) is not sampler:
        return loader
    seed = int(os.environ.get("PL_GLOBAL_SEED", 0))
    return _update_dataloader(loader, EpochSampler(sampler.data_source, seed=seed), mode=stage)


def _is_plain(sampler: RandomSampler) -> bool:
    whole = len(sampler) == len(sampler.data_source)
    return type(sampler) is RandomSampler and sampler.generator is None and not sampler.replacement and whole
