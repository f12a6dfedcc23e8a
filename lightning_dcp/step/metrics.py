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
        for metric, state in zip(metrics, before, strict=True):
            _restore(metric, state)


def _snapshot(metric: Metric) -> dict[str, Any]:
    state = {name: _copy(getattr(metric, name)) for name in metric._defaults}
    return {**state, "_update_count": metric._update_count, "_computed": metric._computed}


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else list(value)


def _restore(metric: Metric, state: dict[str, Any]) -> None:
    for name, value in state.items():
        setattr(metric, name, value)
