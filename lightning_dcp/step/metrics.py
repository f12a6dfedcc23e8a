"""torchmetrics objects in the user's module: every sample counts once, whatever its CP size."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torchmetrics import Metric


@contextmanager
def counted_once(module: nn.Module, *, leader: bool) -> Iterator[None]:
    """Let the user's step update metrics; on ranks that do not lead their group, forget it afterwards.

    All ranks of a group see the same outputs, and a metric adds up over all ranks when it is computed. Undoing the
    update (rather than leaving it out) lets the step see the same values everywhere while it runs.
    """
    metrics = [] if leader else [child for child in module.modules() if isinstance(child, Metric)]
    before = [_snapshot(metric) for metric in metrics]
    try:
        yield
    finally:
        for metric, attributes in zip(metrics, before, strict=True):
            vars(metric).update(attributes)


def _snapshot(metric: Metric) -> dict[str, Any]:
    """All attributes, as wrappers (minimum and maximum, running means) keep more than the states they declare."""
    return {name: _copy(value) for name, value in vars(metric).items()}


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    return list(value) if isinstance(value, list) else value
