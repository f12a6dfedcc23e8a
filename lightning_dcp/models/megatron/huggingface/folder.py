"""Safetensors folders: reading parts of tensors, and writing shards that many ranks have."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from lightning_dcp.errors import ConfigurationError, Problem

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


def require_safetensors() -> None:
    """Raise a plain error where the package is not installed.

    Raises:
        ConfigurationError: it is not.
    """
    try:
        import safetensors.torch  # noqa: F401
    except ModuleNotFoundError as error:
        remedy = "pip install safetensors (it comes with 'lightning-dcp[hf]', too)"
        raise ConfigurationError([Problem("a Hugging Face folder", "no package safetensors", remedy)]) from error


class WeightFolder:
    """The tensors of a folder, read a part at a time. A context: files stay open inside it.

    Args:
        path: a folder with ``model.safetensors``, or with shards and ``model.safetensors.index.json``.

    Attributes:
        files: the file of each tensor, by name.

    Raises:
        ConfigurationError: neither is there, or a shard of the index is missing.
    """

    def __init__(self, path: str | Path) -> None:
        require_safetensors()
        self.path, self._open, self._stack = Path(path), dict[str, Any](), ExitStack()
        if (self.path / INDEX).is_file():
            self.files: dict[str, str] = json.loads((self.path / INDEX).read_text())["weight_map"]
        elif (self.path / SINGLE).is_file():
            with self._stack:
                self.files = dict.fromkeys(self._file(SINGLE).keys(), SINGLE)
            self._open.clear()
        else:
            raise _no_weights(path, f"neither {SINGLE} nor {INDEX}")
        absent = sorted(name for name in set(self.files.values()) if not (self.path / name).is_file())
        if absent:
            raise _no_weights(path, f"{INDEX} names {', '.join(absent)}, which is not there")

    def __enter__(self) -> WeightFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
        self._open.clear()

    def _file(self, name: str) -> Any:
        from safetensors import safe_open

        if name not in self._open:
            self._open[name] = self._stack.enter_context(safe_open(self.path / name, framework="pt", device="cpu"))
        return self._open[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return tuple(self._file(self.files[name]).get_slice(name).get_shape())

    def part(self, name: str, dim: int | None = None, rank: int = 0, size: int = 1) -> Tensor:
        """The ``rank``-th of ``size`` equal parts of a tensor along ``dim`` (0 or 1), or the whole; nothing else is read."""
        whole = self._file(self.files[name]).get_slice(name)
        if dim is None or size == 1:
            return whole[:] if whole.get_shape() else self._file(self.files[name]).get_tensor(name)
        length = whole.get_shape()[dim] // size
        rows = slice(rank * length, (rank + 1) * length)
        part: Tensor = whole[rows] if dim == 0 else whole[:, rows]
        return part


def _no_weights(path: str | Path, found: str) -> ConfigurationError:
    remedy = "download the whole folder; other formats are turned into safetensors by transformers' save_pretrained"
    return ConfigurationError([Problem(f"weights of {str(path)!r}", found, remedy)])


class ShardWriter:
    """One rank's tensors, written to files of limited size. The files have hidden names until :meth:`publish`.

    Args:
        path: the folder, which exists.
        rank: this rank, for the names.
        max_shard_bytes: largest size of a file; a larger tensor has its own.

    Attributes:
        written: for each file the sizes of its tensors in bytes, by name.
        files: this rank's files, those that were begun included.
    """

    def __init__(self, path: Path, rank: int, max_shard_bytes: int) -> None:
        self.path, self.rank, self.max_shard_bytes = path, rank, max_shard_bytes
        self.written: list[dict[str, int]] = []
        self.files: list[Path] = []
        self._pending: dict[str, Tensor] = {}

    def add(self, name: str, tensor: Tensor, dtype: torch.dtype | None = None) -> None:
        """Take a tensor, copied to the CPU."""
        own = torch.empty(tensor.shape, dtype=dtype or tensor.dtype, device="cpu").copy_(tensor)
        if self._pending and sum(t.nbytes for t in self._pending.values()) + own.nbytes > self.max_shard_bytes:
            self.flush()
        self._pending[name] = own

    def flush(self) -> None:
        """Write what is pending."""
        from safetensors.torch import save_file

        if self._pending:
            self.files.append(self.path / f".part-{self.rank:05}-{len(self.written):05}.safetensors")
            save_file(self._pending, self.files[-1], metadata={"format": "pt"})
            self.written.append({name: tensor.nbytes for name, tensor in self._pending.items()})
            self._pending = {}

    def discard(self) -> None:
        """Delete this rank's files, as far as they are there."""
        for file in self.files:
            file.unlink(missing_ok=True)

    def publish(self, every: Sequence[Sequence[dict[str, int]]]) -> None:
        """Give this rank's files their names.

        Args:
            every: the ``written`` of all ranks, by rank.
        """
        names = _names(every)
        for number, hidden in enumerate(self.files):
            self.files[number] = hidden.rename(self.path / names[self.rank, number])


def index_of(every: Sequence[Sequence[dict[str, int]]]) -> dict[str, Any] | None:
    """The index of all files; None for one file, which needs none.

    Args:
        every: the ``written`` of all ranks' writers, by rank.
    """
    names = _names(every)
    if len(names) == 1:
        return None
    sizes = {file: every[rank][number] for (rank, number), file in names.items()}
    return {
        "metadata": {"total_size": sum(sum(tensors.values()) for tensors in sizes.values())},
        "weight_map": {name: file for file, tensors in sizes.items() for name in sorted(tensors)},
    }


def _names(every: Sequence[Sequence[dict[str, int]]]) -> dict[tuple[int, int], str]:
    """The names of all files by rank and number."""
    files = [(rank, number) for rank, written in enumerate(every) for number in range(len(written))]
    if len(files) == 1:
        return {files[0]: SINGLE}
    return {file: f"model-{i:05}-of-{len(files):05}.safetensors" for i, file in enumerate(files, 1)}
