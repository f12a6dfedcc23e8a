"""Batches of a Lightning data module, as the audit sees them."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

from lightning_dcp.batch.view import view
from lightning_dcp.commands.audit_set import AuditedBatch, named
from lightning_dcp.commands.data_module import build_data_module, training_loader
from lightning_dcp.commands.lengths import draw_batches
from lightning_dcp.errors import DataError
from lightning_dcp.segments import SampleSegments

Sample = tuple[Any, int, SampleSegments]


def read_batches(
    path: str, count: int, batch_size: int | None, seed: int
) -> tuple[tuple[AuditedBatch, ...], int | None]:
    """The first training batches of the data module that a YAML file describes, and about how many there are (None: unknown).

    Args:
        path: as for :func:`~lightning_dcp.commands.data_module.build_data_module`.
        count: most batches.
        batch_size: samples a batch, drawn from the batches that the loader makes; None: the loader's own.
        seed: of that draw.

    Raises:
        ConfigurationError: the file cannot be read or describes no data module.
        DataError: it makes no batches, or several loaders instead of one.
        BatchError: batches of an unknown format, or segments that do not fit them.
    """
    read: list[list[Sample]] = []
    loader = training_loader(build_data_module(path))
    for batch in loader:
        read.append(_samples(batch))
        enough = len(read) if batch_size is None else sum(map(len, read)) // batch_size
        if enough >= count:
            break
    if not read:
        raise DataError(f"the training loader of {path} makes no batches")
    total = len(loader) if isinstance(loader, Sized) else None
    if batch_size is not None:
        total = None if total is None else max(1, round(total * sum(map(len, read)) / len(read) / batch_size))
        pool = [sample for samples in read for sample in samples]
        read = [[pool[place] for place in places] for places in draw_batches(range(len(pool)), batch_size, count, seed)]
    return named(tuple(zip(*samples, strict=True)) for samples in read), total  # type: ignore[misc]


def _samples(batch: Any) -> list[Sample]:
    seen = view(batch)
    seen.check()
    segments = seen.segments or ((),) * len(seen.lengths)
    return list(zip(seen.sample_ids, seen.lengths, segments, strict=True))
