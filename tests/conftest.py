"""Fixtures for all tests."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import megatron.core.parallel_state  # noqa: F401  (imported before ranks are forked)

import lightning_dcp  # noqa: F401
from tests.support.ranks import RankPool

torch.set_num_threads(1)  # before any fork: one thread a rank, and no OpenMP pool to inherit
torch.set_num_interop_threads(1)

settings.register_profile("any machine", deadline=None)  # what is tested is results, not the clock
settings.load_profile("any machine")


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Up to eight ranks, forked once."""
    pool = RankPool(8)
    yield pool
    pool.close()
