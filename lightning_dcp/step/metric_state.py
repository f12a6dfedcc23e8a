"""States of torchmetrics objects: taken from one call, joined over packs or ranks, computed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities.data import _flatten, dim_zero_cat
from torchmetrics.utilities.distributed import gather_all_tensors

States = Mapping[str, Any]
"""The states that a metric declared, by name: tensors or lists of tensors."""


@dataclass(frozen=True)
class MetricState:
    """What a metric, and every metric inside it (wrappers hold some), has added up.

    Attributes:
        states: of the metric and those inside it, in the order of ``metric.modules()``; on the CPU.
        updates: how often each was updated.
        default_dtype: torch's default dtype where it was taken, in which metrics make tensors of their own.
    """

    states: tuple[States, ...]
    updates: tuple[int, ...]
    default_dtype: torch.dtype


def inner_metrics(metric: Metric) -> list[Metric]:
    """The metric itself, and those inside it."""
    return [child for child in metric.modules() if isinstance(child, Metric)]


def snapshot(metric: Metric) -> dict[str, Any]:
    """All attributes, as wrappers (minimum and maximum, running means) keep more than the states they declare."""
    return {name: _copy(value) for name, value in vars(metric).items()}


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    return list(value) if isinstance(value, list) else value


@contextmanager
def put_aside(metric: Metric) -> Iterator[None]:
    """Inside, the metric is as if it were fresh; afterwards it is as it was before."""
    metrics = inner_metrics(metric)
    before = [snapshot(each) for each in metrics]
    for each in metrics:  # bound anew first: reset() would empty lists that other metrics of a collection share
        vars(each).update({name: _copy(default) for name, default in each._defaults.items()})
    metric.reset()
    for each in metrics:
        each._to_sync = False
    try:
        yield
    finally:
        for each, attributes in zip(metrics, before, strict=True):
            vars(each).update(attributes)


def state_of_update(metric: Metric, args: Sequence[Any], kwargs: Mapping[str, Any]) -> MetricState:
    """The state that one update gives a fresh metric; the metric itself is left as it is."""
    with put_aside(metric), torch.no_grad():
        metric.update(*args, **kwargs)
        metrics = inner_metrics(metric)
        return MetricState(
            tuple(moved(each.metric_state, torch.device("cpu")) for each in metrics),
            tuple(each._update_count for each in metrics),
            torch.get_default_dtype(),
        )


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def value_of_states(metric: Metric, states: Sequence[MetricState]) -> Any:
    """What the metric computes from states of several packs; the metric itself is left as it is.

    They are joined as torchmetrics joins the states of ranks: each by the ``dist_reduce_fx`` it was declared with.
    """
    with put_aside(metric), torch.no_grad(), _default_dtype(states[0].default_dtype):
        for i, each in enumerate(inner_metrics(metric)):
            joined = join_states(each._reductions, [state.states[i] for state in states])
            vars(each).update(moved(joined, each.device))
            each._update_count = sum(state.updates[i] for state in states)
        return metric.compute()


def moved(states: States, device: torch.device) -> dict[str, Any]:
    """The states on a device, without graphs; lists are copies."""
    return {
        name: [_moved(entry, device) for entry in value] if isinstance(value, list) else _moved(value, device)
        for name, value in states.items()
    }


def _moved(value: Any, device: torch.device) -> Any:
    return value.detach().to(device) if isinstance(value, Tensor) else value


def join_states(reductions: Mapping[str, Any], parts: Sequence[States]) -> dict[str, Any]:
    """The states of several packs or ranks as one, by torchmetrics' rules (``Metric.add_state``).

    Tensors are stacked and reduced (or left stacked where no reduction is declared); lists are put behind each other.
    Unlike in torchmetrics' own gathering, the lists may differ in length and the empty ones have no shape to fit.
    """
    return {name: _join(reduction, [part[name] for part in parts]) for name, reduction in reductions.items()}


def _join(reduction: Callable[..., Any] | None, values: list[Any]) -> Any:
    if len(values) == 1:
        return values[0]
    if all(isinstance(value, Tensor) for value in values) and reduction is not dim_zero_cat:
        stacked = torch.stack(values)
        return stacked if reduction is None else reduction(stacked)
    entries = _flatten([value if isinstance(value, list) else [value] for value in values])
    if reduction is None or not entries:
        return entries
    return [dim_zero_cat(entries)] if reduction is dim_zero_cat else reduction(entries)


class StateSync:
    """Takes the place of ``Metric._sync_dist``, for ranks that run different numbers of packs.

    torchmetrics gathers state by state, so it hangs or fails where ranks have lists of different lengths, and it counts
    the default state of a rank that was never updated. This gathers whole states, and leaves such ranks out.

    Args:
        metric: the metric.
        group: a group of the plane that moves CPU tensors.
    """

    def __init__(self, metric: Metric, group: dist.ProcessGroup) -> None:
        self.metric, self.group = metric, group

    @classmethod
    def install(cls, metric: Metric, group: dist.ProcessGroup) -> None:
        """Let the metric gather by this, unless it has a way of its own."""
        if type(metric)._sync_dist is Metric._sync_dist and isinstance(
            vars(metric).get("_sync_dist", None), cls | None
        ):
            vars(metric)["_sync_dist"] = cls(metric, group)

    @classmethod
    def remove(cls, metric: Metric) -> None:
        """Let the metric gather as its class does again, and let go of the group."""
        if isinstance(vars(metric).get("_sync_dist"), cls):
            del vars(metric)["_sync_dist"]

    def __call__(self, dist_sync_fn: Callable[..., Any] = gather_all_tensors, process_group: Any = None) -> None:
        """Replace the metric's states by those of all ranks. Collective."""
        if dist_sync_fn is not gather_all_tensors or process_group or self.metric.process_group:
            type(self.metric)._sync_dist(self.metric, dist_sync_fn, process_group)
            return
        own = (self.metric._update_count, moved(self.metric.metric_state, torch.device("cpu")))
        every: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(every, own, group=self.group)
        parts = [states for updates, states in every if updates] or [states for _, states in every]
        vars(self.metric).update(moved(join_states(self.metric._reductions, parts), self.metric.device))

    def __deepcopy__(self, memo: dict[int, Any]) -> StateSync:
        return StateSync(copy.deepcopy(self.metric, memo), self.group)

    def __reduce__(self) -> Any:
        """A metric that is saved has its own way of gathering again."""
        return getattr, (self.metric, "_sync_dist")  # when it is read back, the metric has only that of its class
