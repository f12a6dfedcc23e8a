"""Error messages: long lists of names, and what failed on which rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch.distributed.checkpoint.api import CheckpointException

from lightning_dcp.errors import CheckpointError

_MOST = 8


def listed(what: str, names: Sequence[str]) -> list[str]:
    """One line with the first names, or none if there are no names."""
    if not names:
        return []
    more = f", and {len(names) - _MOST} more" if len(names) > _MOST else ""
    return [f"  {what}: {', '.join(sorted(names)[:_MOST])}{more}"]


@contextmanager
def naming_failures(what: str) -> Iterator[None]:
    """Make one of our errors of torch's, which is no ``Exception`` and passes by what handles these.

    Args:
        what: could not be done.

    Raises:
        CheckpointError: in its place, the same on all ranks.
    """
    try:
        yield
    except CheckpointException as error:
        failures = (f"rank {rank}: {wrapped[0]!r}" for rank, wrapped in sorted(error.failures.items()))
        raise CheckpointError(f"{what}; {'; '.join(failures)}") from error
