"""torchmetrics objects in the user's module: every sample counts once, whatever its CP size."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torchmetrics import Metric

from lightning_dcp.errors import BatchError


@contextmanager
def counted_once(module: nn.Module, *, leader: bool) -> Iterator[None]:
    """Let the user's step update metrics; on ranks that do not lead their group, forget it afterwards.

    All ranks of a group see the same outputs, and a metric adds up over all ranks when it is computed. Undoing the
    update (rather than leaving it out) lets the step see the same values everywhere while it runs.
    """
    metrics = [child for child in module.modules() if isinstance(child, Metric)]
    before = [_snapshot(metric) for metric in metrics] if not leader else []
    own_sync = [metric.dist_sync_fn for metric in metrics]
    try:
        for metric in metrics:
            metric.dist_sync_fn = _refuse_sync
        yield
    finally:
        for metric, sync in zip(metrics, own_sync, strict=True):
            metric.dist_sync_fn = sync
        for metric, attributes in zip(metrics, before, strict=not leader):
            _restore(metric, attributes)


def _refuse_sync(*args: Any, **kwargs: Any) -> Any:
    raise BatchError(
        "a metric is computed over all ranks inside a step, but ranks run different numbers of packs and would wait for "
        "each other for ever. Update it in the step, log the metric object itself, or compute it in on_*_epoch_end."
    )


def _restore(metric: Metric, attributes: dict[str, Any]) -> None:
    """The attributes as they were; a list state that was empty keeps an empty part of what was added.

    A rank that leads no group has nothing to add when the metric is computed, but torchmetrics needs to know the number
    of dimensions from it.
    """
    for name, default in metric._defaults.items():
        added = getattr(metric, name)
        if isinstance(default, list) and isinstance(added, list) and added and not attributes[name] and added[0].dim():
            attributes[name] = [added[0][:0]]
    vars(metric).update(attributes)


def _snapshot(metric: Metric) -> dict[str, Any]:
    """All attributes, as wrappers (minimum and maximum, running means) keep more than the states they declare."""
    return {name: _copy(value) for name, value in vars(metric).items()}


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    return list(value) if isinstance(value, list) else value
