"""Watching the tensors that are made: how large each is, and how many bytes live at one time."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class TensorWatch(TorchDispatchMode):
    """While active, looks at every tensor that an operation of this thread returns.

    Attributes:
        largest: elements of the largest tensor.
        peak: the most bytes that lived at one time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        self.live = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        results = func(*args, **(kwargs or {}))
        self.see(results)
        return results

    def see(self, tensors: Any) -> None:
        """Count tensors in, such as those that were there before."""
        for tensor in pytree.tree_leaves(tensors):
            if isinstance(tensor, Tensor):
                self._see(tensor)

    def _see(self, tensor: Tensor) -> None:
        self.largest = max(self.largest, tensor.numel())
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size
