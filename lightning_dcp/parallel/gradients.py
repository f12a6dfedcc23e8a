"""The gradient sum over the plane: in buckets, once per optimizer step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_dcp.parallel.clock import WaitClock

BUCKET_BYTES = 25 * 1024 * 1024
"""Size of a bucket; torch's DistributedDataParallel uses the same default."""


def all_reduce_gradients(
    parameters: Iterable[nn.Parameter], group: dist.ProcessGroup, clock: WaitClock, *, bucket_bytes: int = BUCKET_BYTES
) -> None:
    """Sum ``.grad`` of every trainable parameter over a group, in place.

    A parameter that no rank used keeps ``grad=None``, as in one process, so that optimizers skip it (weight decay
    included); one that only some ranks used counts as 0 on the others. All ranks pass the same parameters in the same
    order.
    """
    trainable = [p for p in parameters if p.requires_grad]
    if not trainable or dist.get_world_size(group) == 1:
        return
    used = torch.tensor([p.grad is not None for p in trainable], dtype=torch.int32, device=trainable[0].device)
    with clock.waiting():
        dist.all_reduce(used, op=dist.ReduceOp.MAX, group=group)
    buckets: dict[torch.dtype, list[Tensor]] = defaultdict(list)
    for parameter, anywhere in zip(trainable, used.tolist(), strict=True):
        if anywhere:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            buckets[parameter.grad.dtype].append(parameter.grad)
    for grads in buckets.values():
        for bucket in _cut(grads, bucket_bytes):
            _sum_bucket(bucket, group, clock)


def _cut(grads: list[Tensor], bucket_bytes: int) -> Iterable[list[Tensor]]:
    bucket: list[Tensor] = []
    filled = 0
    for grad in grads:
        if bucket and filled + grad.nbytes > bucket_bytes:
            yield bucket
            bucket, filled = [], 0
        bucket.append(grad)
        filled += grad.nbytes
    if bucket:
        yield bucket


def _sum_bucket(grads: list[Tensor], group: dist.ProcessGroup, clock: WaitClock) -> None:
    flat = torch.cat([grad.reshape(-1) for grad in grads])
    with clock.waiting():
        dist.all_reduce(flat, group=group)
    for grad, part in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
        grad.copy_(part.view_as(grad))
