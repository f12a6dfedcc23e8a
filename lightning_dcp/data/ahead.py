"""Loaders that read one batch ahead of the one they hand out, so that its plan can be made in the meantime."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

Announce = Callable[[Any], None]
"""Gets each batch as soon as it is read; must not change it."""


@dataclass(frozen=True)
class _Read:
    """What came of reading one batch: the batch, the end, or an error."""

    batch: Any = None
    ended: bool = False
    error: Exception | None = None


def read_ahead(batches: Iterable[Any], announce: Announce, most: float = math.inf) -> Iterator[Any]:
    """The same batches in the same order, each handed out after the next one has been read and announced.

    What goes wrong while a batch is read ahead is raised when that batch is asked for: the one before is still handed
    out. Nothing happens before the first ``next``.

    Args:
        batches: where they come from.
        announce: told of each batch once it is read.
        most: batches that will be asked for, as far as is known: what comes after them is not read ahead.
    """
    iterator = iter(batches)
    following = _read(iterator, announce)
    for count in itertools.count(1):
        current = following
        if current.ended:
            return
        if current.error is not None:
            raise current.error
        if count < most:
            following = _read(iterator, announce)
            yield current.batch
        else:
            yield current.batch
            following = _read(iterator, announce)


def _read(iterator: Iterator[Any], announce: Announce) -> _Read:
    try:
        batch = next(iterator)
    except StopIteration:  # not kept: its traceback would keep the iterator, and so its worker processes
        return _Read(ended=True)
    except Exception as error:  # an interrupt is none, and ends the run at once
        return _Read(error=error)
    announce(batch)
    return _Read(batch)


def epoch_batches(loader: object, limit: int | float) -> float:
    """Batches that the trainer takes of one epoch; infinite where no length is known.

    Args:
        loader: any loader.
        limit: as in ``Trainer(limit_train_batches=...)``: a number of batches (int) or a share of them (float).
    """
    try:
        length: float = len(loader)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        length = math.inf
    if isinstance(limit, int):
        return min(length, limit)
    return length if math.isinf(length) else int(length * limit)


class AheadLoader:
    """Any loader, read one batch ahead. Everything else, also what is set, is that of the loader wrapped.

    Args:
        loader: the loader. One with a state of its own must not be wrapped: its state would count a batch that is only
            read ahead.
        announce: told of each batch once it is read.
        most: from the loader to the batches that will be asked of the iteration that begins.
    """

    def __init__(self, loader: Any, announce: Announce, most: Callable[[Any], float]) -> None:
        vars(self).update(wrapped=loader, _announce=announce, _most=most)

    def __getattr__(self, name: str) -> Any:
        if "wrapped" not in vars(self):  # while being unpickled or copied
            raise AttributeError(name)
        return getattr(self.wrapped, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.wrapped, name, value)

    def __len__(self) -> int:
        return len(self.wrapped)

    def __iter__(self) -> Iterator[Any]:
        yield from read_ahead(self.wrapped, self._announce, self._most(self.wrapped))
