"""torchmetrics objects in the user's module: every sample counts once, whatever its CP size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection
from torchmetrics.wrappers import MinMaxMetric

from lightning_dcp.errors import BatchError
from lightning_dcp.step.metric_state import MetricState, StateSync, snapshot, state_of_update
from lightning_dcp.step.windows import Window, close_windows, windows_of


def metrics_of(module: nn.Module) -> list[Metric]:
    """All metrics of a module, those inside collections and wrappers included."""
    return [child for child in module.modules() if isinstance(child, Metric)]


@contextmanager
def metrics_of_batch(module: nn.Module, group: dist.ProcessGroup) -> Iterator[list[Window]]:
    """Around all packs of a batch, on every rank of the plane, whether it has packs or not. Collective.

    Metrics are set up so that they add up over ranks with different numbers of packs, until :func:`release_metrics`. What
    they computed before the batch is forgotten on all ranks: one that kept it would not take part when the others compute
    again.

    A metric that is updated outside the steps (in ``on_validation_batch_end``, say) sees the whole batch on every rank;
    it needs ``sync_on_compute=False``.

    Args:
        module: the user's module.
        group: of the plane, for CPU tensors.

    Yields:
        What :func:`counted_once` needs to know of the batch.
    """
    metrics = metrics_of(module)
    for metric in metrics:
        StateSync.install(metric, group)
    for collection in _collections_of(module):
        _share_no_states(collection)
    windows = windows_of(module)
    yield windows
    close_windows(windows, group)
    for metric in metrics:
        metric._computed = None


def release_metrics(module: nn.Module) -> None:
    """Undo, at the end of a run, what :func:`metrics_of_batch` set up; what metrics have added up stays.

    Each rank then holds what its own packs gave, and torchmetrics gathers over the whole world, as after a run with plain
    Lightning. Does nothing to metrics that were not set up.

    Args:
        module: the user's module.
    """
    for metric in metrics_of(module):
        StateSync.remove(metric)
    for collection in _collections_of(module):
        if _OWN_GROUPS in vars(collection):
            collection._enable_compute_groups = vars(collection).pop(_OWN_GROUPS)


_OWN_GROUPS = "_compute_groups_outside_runs"
"""Where a collection keeps, during a run, what its user chose as ``compute_groups``."""


def _collections_of(module: nn.Module) -> list[MetricCollection]:
    return [child for child in module.modules() if isinstance(child, MetricCollection)]


def _share_no_states(collection: MetricCollection) -> None:
    """Which metrics share a state is a guess from the first batch, here one pack: do not guess."""
    if collection._enable_compute_groups and not collection._groups_checked:
        vars(collection)[_OWN_GROUPS] = collection._enable_compute_groups
        collection._enable_compute_groups = False


@contextmanager
def counted_once(module: nn.Module, *, leader: bool, windows: Sequence[Window] = ()) -> Iterator[None]:
    """Let the user's step update metrics; on ranks that do not lead their group, forget it afterwards.

    All ranks of a group see the same outputs, and a metric adds up over all ranks when it is computed. Undoing the
    update (rather than leaving it out) lets the step see the same values everywhere while it runs.

    Args:
        module: the user's module.
        leader: whether this rank speaks for its group.
        windows: of the batch, from :func:`metrics_of_batch`.
    """
    metrics = metrics_of(module)
    before = [snapshot(metric) for metric in metrics] if not leader else []
    own_sync = [metric.dist_sync_fn for metric in metrics]
    with ExitStack() as stack:
        for window in windows:
            stack.enter_context(window.pack(leader=leader))
        try:
            for metric in metrics:
                metric.dist_sync_fn = _refuse_sync
            yield
        finally:
            for metric, sync in zip(metrics, own_sync, strict=True):
                metric.dist_sync_fn = sync
            for metric, attributes in zip(metrics, before, strict=not leader):
                vars(metric).update(attributes)


def _refuse_sync(*args: Any, **kwargs: Any) -> Any:
    raise BatchError(
        "a metric is computed over all ranks inside a step, but ranks run different numbers of packs and would wait for "
        "each other for ever. Update it in the step, log the metric object itself, or compute it in on_*_epoch_end."
    )


class MetricCalls:
    """The last call of each metric inside one pack's step (``self.accuracy(scores, labels)``; not ``.update``)."""

    def __init__(self) -> None:
        self._calls: dict[int, tuple[Sequence[Any], Mapping[str, Any]]] = {}

    def note(self, metric: Metric, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Remember a call.

        Raises:
            BatchError: the metric keeps something of each call's value.
        """
        if isinstance(metric, MinMaxMetric):
            raise BatchError(
                "a MinMaxMetric is called inside a step: it would keep the least and greatest value of packs, not of "
                "batches. Call its update() in the step and compute it in on_*_epoch_end."
            )
        self._calls[id(metric)] = args, kwargs

    def state(self, metric: Metric) -> MetricState | None:
        """The state that the last call alone gives, if there was one that left a value to log."""
        call = self._calls.get(id(metric))
        return None if call is None or metric._forward_cache is None else state_of_update(metric, *call)


@contextmanager
def noting_calls(module: nn.Module) -> Iterator[MetricCalls]:
    """Note each call of a metric of the module inside, and leave out updates with nothing in them.

    A pack may have no targets where every batch has some. Many metrics refuse empty tensors; they would add nothing.
    """
    calls, metrics = MetricCalls(), metrics_of(module)
    names = ("forward", "update")
    own: list[dict[str, Any]] = [{name: vars(m)[name] for name in names if name in vars(m)} for m in metrics]
    for metric in metrics:
        vars(metric).update(forward=_noted(metric, calls), update=_left_out_if_empty(metric.update, None))
    try:
        yield calls
    finally:
        for metric, attributes in zip(metrics, own, strict=True):
            for name in names:
                del vars(metric)[name]
            vars(metric).update(attributes)


def _noted(metric: Metric, calls: MetricCalls) -> Callable[..., Any]:
    forward = metric.forward

    def noted(*args: Any, **kwargs: Any) -> Any:
        calls.note(metric, args, kwargs)
        return forward(*args, **kwargs)

    return _left_out_if_empty(noted, torch.tensor(torch.nan, device=metric.device))


def _left_out_if_empty(function: Callable[..., Any], instead: Any) -> Callable[..., Any]:
    @wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        return instead if tensors and not any(t.numel() for t in tensors) else function(*args, **kwargs)

    return wrapped
