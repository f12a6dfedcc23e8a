"""Random numbers in a step: the same on all ranks of a group outside regions, different ones inside."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def seed_of(*parts: object) -> int:
    """A seed that follows from its parts alone, equal on all ranks and machines."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big")


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Draw from a stream of its own inside, and go on with the old one afterwards.

    Ranks of a group run different numbers of packs before a common one, so their global streams drift apart; the
    group's loss is one loss only if noise, masks and dropout outside the region are the same on all of its ranks.
    """
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield
