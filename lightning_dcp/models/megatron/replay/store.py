"""Recorded routes by sample, whole and in original order, on the CPU."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_dcp.batch.view import BatchView
from lightning_dcp.errors import BatchError


@dataclass(frozen=True)
class StoredSample:
    """One sample's routes.

    Attributes:
        checksum: of its tokens; another sample with the same id is found out by it.
        routes: ``[L, own layers, topk]``.
    """

    checksum: int
    routes: Tensor


class RouteStore:
    """Recorded routes of one model, by the ids of samples.

    Every rank holds all samples, as any of them may get any sample when routes are replayed, with the layers of its own
    pipeline stage. A token takes ``layers * topk`` bytes (twice that beyond 128 experts).

    Attributes:
        layers: numbers of the layers that the routes are of, from 1.
        samples: what was recorded; a sample that is recorded again replaces what was there.
    """

    def __init__(self, layers: Sequence[int]) -> None:
        self.layers = tuple(layers)
        self.samples: dict[int, StoredSample] = {}

    def put(self, view: BatchView, indices: Sequence[int], packed: Tensor) -> None:
        """Keep the routes ``[T, own layers, topk]`` of these samples of a batch, one after another."""
        sums = checksums(view, indices)
        for i, part, checksum in zip(indices, packed.split([view.lengths[i] for i in indices]), sums, strict=True):
            self.samples[view.sample_ids[i]] = StoredSample(checksum, part.clone())

    def packed(self, view: BatchView, indices: Sequence[int]) -> Tensor:
        """The routes of these samples of a batch, ``[T, own layers, topk]``.

        Raises:
            BatchError: a sample that was not recorded, or another one under its id.
        """
        found = []
        for i, checksum in zip(indices, checksums(view, indices), strict=True):
            name = view.sample_ids[i]
            stored = self.samples.get(name)
            if stored is None:
                raise BatchError(
                    f"router replay has no routes of sample {name}: {len(self.samples)} samples are recorded. Record them in "
                    "this step (with replay.record(): ...), or before it, with the same sample_ids (a stage in record=[...] "
                    "or keep=True)"
                )
            if stored.checksum != checksum:
                raise BatchError(
                    f"the routes recorded for sample {name} belong to other tokens ({len(stored.routes)} of them, "
                    f"{view.lengths[i]} here). Give each sample an id of its own: sample_ids of the batch, for packed "
                    "batches the samples' 'index'; and record again what has changed."
                )
            found.append(stored.routes)
        return torch.cat(found)


def checksums(view: BatchView, indices: Sequence[int]) -> list[int]:
    """CRC-32 of each sample's tokens.

    Raises:
        BatchError: no per-token ``input_ids``.
    """
    part = view.part(indices)
    tokens = field_of(part, "input_ids")
    if not isinstance(tokens, Tensor) or not part.per_token(tokens):
        raise BatchError(
            "recorded routes are kept by sample, which needs a batch with input_ids, one sequence a sample"
        )
    flat = part.flatten(tokens).detach().cpu().long().split(list(part.lengths))
    return [zlib.crc32(sample.numpy().tobytes()) for sample in flat]


def field_of(view: BatchView, name: str) -> Any:
    """A field of a batch of any format; None if it has no such field."""
    return view.batch[name] if name in view.batch else None  # noqa: SIM401  (a PackedBatch has no get)
