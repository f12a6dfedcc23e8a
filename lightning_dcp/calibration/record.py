"""What attention a model computes: recorded while it runs one step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_dcp.attention import ring
from lightning_dcp.attention.kernels import Kernel, Rows
from lightning_dcp.parallel.blocks import AttentionBlocks


@dataclass(frozen=True)
class AttentionShape:
    """The heads of one attention layer.

    Attributes:
        heads: query heads.
        kv_heads: key and value heads.
        head_dim: width of a head.
        dtype: of queries, keys and values.
    """

    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def forward_bytes(self) -> int:
        """Bytes of the keys and values of one token."""
        return 2 * self.kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def backward_bytes(self) -> int:
        """Bytes of the keys and values of one token and of their gradients, which travel in float32 or better."""
        wide = torch.promote_types(self.dtype, torch.float32)
        return self.forward_bytes + 2 * self.kv_heads * self.head_dim * wide.itemsize


@dataclass(frozen=True)
class AttentionCalls:
    """Attention calls of one pack on a group of one rank.

    Attributes:
        forward: calls by shape; twice the layers where a checkpointed layer is called again in backward.
        backward: as ``forward``.
    """

    forward: Counter[AttentionShape] = field(default_factory=Counter)
    backward: Counter[AttentionShape] = field(default_factory=Counter)

    @property
    def hop_bytes(self) -> float:
        """Bytes that one hop of a ring would carry for each token of a shard, over all calls."""
        forward = sum(shape.forward_bytes * count for shape, count in self.forward.items())
        return float(forward + sum(shape.backward_bytes * count for shape, count in self.backward.items()))


class _Recorded(Kernel):
    """A kernel that counts its calls."""

    def __init__(self, kernel: Kernel, calls: AttentionCalls) -> None:
        self._kernel, self._calls = kernel, calls

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, blocks: AttentionBlocks, scale: float
    ) -> Iterator[tuple[Rows, Tensor, Tensor]]:
        self._calls.forward[_shape(q, k)] += 1
        return self._kernel.forward(q, k, v, blocks, scale)

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        blocks: AttentionBlocks,
        scale: float,
    ) -> Iterator[tuple[Rows, Rows, Tensor, Tensor, Tensor]]:
        self._calls.backward[_shape(q, k)] += 1
        return self._kernel.backward(grad, q, k, v, out, lse, blocks, scale)


def _shape(q: Tensor, k: Tensor) -> AttentionShape:
    return AttentionShape(q.shape[1], k.shape[1], q.shape[2], q.dtype)


@contextmanager
def recording() -> Iterator[AttentionCalls]:
    """Record the attention calls made inside, which must be on groups of one rank.

    The kernel's chooser is exchanged for the time of one step, so that every model is seen, whichever way its
    attention reaches the ring, and so that nothing is left in the way of what is timed afterwards.
    """
    calls, choose = AttentionCalls(), ring.choose_kernel

    def choose_recorded(q: Tensor) -> Kernel:
        return _Recorded(choose(q), calls)

    _set_chooser(choose_recorded)
    try:
        yield calls
    finally:
        _set_chooser(choose)


def _set_chooser(choose: Callable[[Tensor], Kernel]) -> None:
    vars(ring)["choose_kernel"] = choose
