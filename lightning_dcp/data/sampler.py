"""A sampler whose order follows from a seed and the epoch, and is therefore the same on every rank."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sized

import torch
from torch.utils.data import Sampler


class EpochSampler(Sampler[int]):
    """Shuffles anew each epoch; every rank draws the same order, so every rank reads the same batch.

    The order depends on nothing but ``(seed, epoch, number of samples)``, not on torch's global random state, so an
    epoch can be replayed from the middle. Lightning calls :meth:`set_epoch`; in a loop of one's own, call it too.

    Args:
        dataset: the data set, for its length.
        seed: of the shuffle.
        shuffle: ``False`` gives data-set order in every epoch.
    """

    def __init__(self, dataset: Sized, *, seed: int = 0, shuffle: bool = True) -> None:
        self.dataset = dataset
        self.seed = seed
        self.shuffle = shuffle
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the iterations to come."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.dataset)

    def __iter__(self) -> Iterator[int]:
        if not self.shuffle:
            return iter(range(len(self)))
        # hashed rather than added up, or epoch 1 of seed 0 would be epoch 0 of seed 1
        digest = hashlib.blake2b(f"{self.seed} {self.epoch}".encode(), digest_size=7).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
        return iter(torch.randperm(len(self), generator=generator).tolist())
