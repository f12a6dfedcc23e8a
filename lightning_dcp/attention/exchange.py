"""Point-to-point transfers around a ring: what a rank holds goes to the next one, the previous one's comes in."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dcp.parallel.context import CPContext


class Transfer:
    """One hop under way; compute may go on until :meth:`wait`."""

    def __init__(
        self,
        sent: Tensor,
        received: Tensor,
        shapes: Sequence[torch.Size],
        works: Sequence[dist.Work],
        context: CPContext,
    ) -> None:
        self._sent = sent  # must live until the transfer ends
        self._received, self._shapes, self._works, self._context = received, shapes, works, context

    def wait(self) -> list[Tensor]:
        """The tensors that came in, once both directions are done."""
        with self._context.clock.waiting():
            for work in self._works:
                work.wait()
        parts = self._received.split([shape.numel() for shape in self._shapes])
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]


def start_hop(tensors: Sequence[Tensor], tokens: int, context: CPContext, *, tag: int) -> Transfer:
    """Send tensors to the next rank of the ring and receive the previous rank's, in one message each way.

    Args:
        tensors: ``[T_own, ...]`` each, of one dtype.
        tokens: tokens of what comes in; its other dimensions are those of ``tensors``.
        context: whose group is the ring.
        tag: tells apart transfers that are under way at the same time.
    """
    ranks, rank = context.group.global_ranks, context.rank
    following, previous = ranks[(rank + 1) % context.size], ranks[(rank - 1) % context.size]
    sent = torch.cat([t.reshape(-1) for t in tensors])
    shapes = [torch.Size((tokens, *t.shape[1:])) for t in tensors]
    received = sent.new_empty(sum(shape.numel() for shape in shapes))
    ops = []
    # An empty share is not sent; both ends know from the layout that it is empty.
    if sent.numel():
        ops.append(dist.P2POp(dist.isend, sent, following, context.handle, tag))
    if received.numel():
        ops.append(dist.P2POp(dist.irecv, received, previous, context.handle, tag))
    works = dist.batch_isend_irecv(ops) if ops else []
    return Transfer(sent, received, shapes, works, context)
