"""A sharded checkpoint is a directory; one that bears its name is complete."""

from __future__ import annotations

import shutil
from pathlib import Path

from lightning_dcp.errors import CheckpointError

COMPLETE = "metadata.json"
"""What Megatron-Core's ``dist_checkpointing`` writes last."""
REST = "lightning.ckpt"
"""All of a Lightning checkpoint that is not in shards: loops, callbacks, hyper-parameters, weights outside the models."""


def is_sharded(path: str | Path) -> bool:
    """Whether a path is a sharded checkpoint."""
    return (Path(path) / COMPLETE).is_file() and (Path(path) / REST).is_file()


def local_path(path: str | Path) -> Path:
    """The absolute path of a checkpoint.

    Raises:
        CheckpointError: a URL.
    """
    if "://" in str(path):
        raise CheckpointError(
            f"asked: a sharded checkpoint at {path}; found: a URL, and shards are written to a file system that all ranks "
            "share; do: give a path on one, and copy the directory afterwards"
        )
    return Path(path).absolute()


def unfinished(path: Path) -> Path:
    """Where a checkpoint lies while it is written: beside its place, under a name that no one looks for."""
    return path.with_name(f".{path.name}.unfinished")


def begin(path: Path) -> None:
    """Make the directory that a checkpoint is written to; what an earlier, interrupted one has left there goes."""
    _delete(unfinished(path))
    unfinished(path).mkdir(parents=True)


def commit(path: Path) -> None:
    """Give a complete checkpoint its name; what bore it before goes."""
    before = _set_aside(path)
    unfinished(path).rename(path)
    _delete(before)


def remove(path: Path) -> None:
    """Delete a checkpoint; one that is deleted in part no longer bears its name."""
    _delete(_set_aside(path))


def _set_aside(path: Path) -> Path:
    aside = path.with_name(f".{path.name}.removed")
    _delete(aside)
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        path.rename(aside)
    return aside


def _delete(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    elif path.exists():
        path.unlink()
