"""A data loader that can be resumed in the middle of an epoch, through Lightning's stateful-loader protocol."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_dcp.data.ahead import Announce, epoch_batches, read_ahead
from lightning_dcp.errors import DataError, Problem, raise_problems

GLOBALLY_RANDOM = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
"""Samplers whose order comes from a random state that no checkpoint holds."""


class ResumableLoader:
    """Counts the batches handed out and, once a state is loaded, skips as many without loading their data.

    Only the order of samples is restored. Random numbers drawn within the data set (augmentation) are not, as
    workers are seeded anew; and a sampler of one's own must give the same order again for the same epoch.

    ``iter()`` starts nothing: workers, and the sampler's order, wait for the first ``next``. Lightning creates the
    iterator before it calls ``set_epoch`` on the sampler, and calls ``iter()`` just to see whether it can.

    Everything else (``dataset``, ``sampler``, ``num_workers``...) is that of the loader wrapped.

    Args:
        loader: a data loader over a map-style data set.
        limit: what the trainer takes of an epoch, as in ``Trainer(limit_train_batches=...)``. It must be told here
            too, for a state saved with the last batch of an epoch to mean the start of the next one.

    Attributes:
        announce: if given, told of each batch once it is read, and one batch of the epoch is read ahead. A batch counts
            as handed out when it is, not when it is read: one that is read ahead is read again by a resumed run.

    Raises:
        ConfigurationError: not a ``DataLoader``, or one over an iterable-style data set.
    """

    def __init__(self, loader: DataLoader[Any], *, limit: int | float = 1.0) -> None:
        raise_problems(_problems(loader))
        self._source = loader
        self._limit = limit
        self.announce: Announce | None = None
        self._handed_out = 0
        self._to_skip = 0
        self._indices = _SkippingSampler(loader.sampler if loader.batch_sampler is None else loader.batch_sampler)
        # A shallow copy shares everything with the user's loader but the index sampler; torch lets nobody set that
        # attribute on a loader, hence vars(). Building a new DataLoader would lose subclasses.
        self._loader = copy.copy(loader)
        vars(self._loader)["sampler" if loader.batch_sampler is None else "batch_sampler"] = self._indices
        self._loader._iterator = None

    @property
    def sampler(self) -> Any:
        """The loader's own sampler, on which ``set_epoch`` is called."""
        return self._source.sampler

    @property
    def batch_sampler(self) -> Any:
        """The loader's own batch sampler, not the one that skips."""
        return self._source.batch_sampler

    @property
    def worker_init_fn(self) -> Any:
        """Set-up of each worker. Lightning sets it after wrapping, so it is passed on."""
        return self._loader.worker_init_fn

    @worker_init_fn.setter
    def worker_init_fn(self, value: Any) -> None:
        self._loader.worker_init_fn = value

    @property
    def _iterator(self) -> Any:
        """The loader's persistent iterator. Lightning shuts its workers down at the end and sets it to ``None``."""
        return self._loader._iterator

    @_iterator.setter
    def _iterator(self, value: Any) -> None:
        self._loader._iterator = value

    def __getattr__(self, name: str) -> Any:
        if "_loader" not in self.__dict__:  # while being unpickled or copied
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        # a generator: nothing below happens before the first next()
        self._handed_out, self._to_skip = self._to_skip, 0
        count = self._handed_out
        self._indices.skip = count
        for batch in self._batches(self._epoch_length() - count):
            count += 1
            self._handed_out = count  # before the yield, so that a state saved during the step counts its batch
            yield batch
        self._handed_out = 0

    def _batches(self, most: float) -> Iterable[Any]:
        return self._loader if self.announce is None else read_ahead(self._loader, self.announce, most)

    def state_dict(self) -> dict[str, int]:
        """``batches``: how many of the running epoch have been handed out; 0 once all of them have."""
        count = self._to_skip or self._handed_out
        return {"batches": 0 if count >= self._epoch_length() else count}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Let the next iteration start after that many batches; later ones start at the first batch again.

        Raises:
            DataError: the order cannot be restored, or the state belongs to other data.
        """
        batches = state_dict.get("batches")
        length = self._epoch_length()
        if not isinstance(batches, int) or batches < 0:
            raise DataError(f"a loader state holds 'batches', a whole number from 0; found {dict(state_dict)}")
        if batches and batches >= length:
            raise DataError(
                f"the checkpoint was written after {batches} batches of an epoch that has only {length} now: resume "
                "with the data, batch size and limit it was written with"
            )
        if batches and (sampler := _globally_random(self._source)):
            raise DataError(
                f"cannot resume after {batches} batches: the order of {type(sampler).__name__} comes from a random "
                "state that is not in the checkpoint. Use a seeded sampler: lightning_dcp.data.EpochSampler, or the "
                "DistributedSampler that Lightning puts in by default when it trains on several devices"
            )
        self._to_skip, self._handed_out = batches, 0

    def _epoch_length(self) -> float:
        """Batches of one epoch as the trainer counts them."""
        return epoch_batches(self._loader, self._limit)


class _SkippingSampler:
    """A (batch) sampler without its first ``skip`` entries; its length stays that of a whole epoch."""

    def __init__(self, source: Any) -> None:
        self.source = source
        self.skip = 0

    def __iter__(self) -> Iterator[Any]:
        # the number is taken now; entries are drawn later, by the iterator of the data loader
        return islice(iter(self.source), self.skip, None)

    def __len__(self) -> int:
        return len(self.source)


def _problems(loader: object) -> list[Problem]:
    if not isinstance(loader, DataLoader):
        remedy = "give it a torch.utils.data.DataLoader (or subclass)"
        return [Problem("a resumable loader", f"a {type(loader).__name__} to wrap", remedy)]
    if isinstance(loader.dataset, IterableDataset):
        found = f"the iterable-style data set {type(loader.dataset).__name__}"
        return [Problem("a resumable loader", found, "use a map-style data set (__getitem__ and __len__)")]
    return []


def _globally_random(loader: DataLoader[Any]) -> object | None:
    """A sampler that cannot give its order again, also within Lightning's DistributedSamplerWrapper."""
    candidates: list[Any] = [loader.sampler, getattr(loader.batch_sampler, "sampler", None)]
    candidates += [getattr(getattr(sampler, "dataset", None), "_sampler", None) for sampler in candidates]
    return next((s for s in candidates if isinstance(s, GLOBALLY_RANDOM) and not hasattr(s, "set_epoch")), None)
