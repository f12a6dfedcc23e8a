"""``self.log`` inside a step: recorded once a pack, logged once a batch with the value one process would have."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torchmetrics import Metric

from lightning_dcp.errors import BatchError


@dataclass(frozen=True)
class LoggedValue:
    """One value that a pack logged.

    Attributes:
        value: the value; None for a torchmetrics object, which keeps its own state.
        batch_size: the weight that the user gave, if any.
        options: the other arguments of ``self.log``.
    """

    value: float | Tensor | None
    batch_size: int | None
    options: Mapping[str, Any] = field(default_factory=dict)


PackLogs = dict[str, LoggedValue]
"""What one pack logged, by key."""

_SIGNATURE = inspect.signature(LightningModule.log)


@contextmanager
def recording(module: LightningModule) -> Iterator[PackLogs]:
    """Collect what the module logs inside, instead of logging it."""
    logs: PackLogs = {}

    def record(*args: Any, **kwargs: Any) -> None:
        options = dict(_SIGNATURE.bind(module, *args, **kwargs).arguments)
        for handled in ("self", "sync_dist", "sync_dist_group"):  # the joined value is the same on all ranks
            options.pop(handled, None)
        name, value, batch_size = options.pop("name"), options.pop("value"), options.pop("batch_size", None)
        _refuse(name, value, options, in_training=module.trainer.training)
        if isinstance(value, Metric):
            options["metric_attribute"] = options.get("metric_attribute") or _attribute_of(module, name, value)
            value = None
        logs[name] = LoggedValue(value.detach().cpu() if isinstance(value, Tensor) else value, batch_size, options)

    # An attribute of the instance, so that log_dict and calls from callbacks go the same way.
    module.log = record  # type: ignore[method-assign]
    try:
        yield logs
    finally:
        del module.log


def _refuse(name: str, value: Any, options: Mapping[str, Any], *, in_training: bool) -> None:
    if options.get("enable_graph"):
        raise BatchError(f"self.log({name!r}, enable_graph=True): values are joined over packs, which keeps no graph")
    on_step = options.get("on_step")
    # Lightning's default in training_step is on_step=True
    if isinstance(value, Metric) and (in_training if on_step is None else on_step):
        raise BatchError(
            f"self.log({name!r}, metric, on_step=True): a metric object has no value for one batch under this strategy; "
            "log it with on_step=False, on_epoch=True"
        )


def _attribute_of(module: LightningModule, name: str, metric: Metric) -> str:
    found = next((path for path, child in module.named_modules() if child is metric), None)
    if found is None:
        raise BatchError(f"self.log({name!r}, metric): the metric is no attribute of the LightningModule")
    return found


@dataclass(frozen=True)
class WeightedLogs:
    """The logs of one pack, with the weight of its loss and the number of its samples."""

    logs: PackLogs
    weight: float
    samples: int


def replay(module: LightningModule, packs: Sequence[WeightedLogs], *, samples: int, summed: bool) -> None:
    """Log, once, what one process would have logged for the whole batch; all ranks log the same.

    A value is weighted like the loss, or by ``batch_size`` where the user gave it (``reduce_fx`` sum, min and max are
    what they say). Over an epoch Lightning weighs batches by ``batch_size``: the user's, added up, or the number of
    samples.

    Args:
        module: the user's module.
        packs: of all packs of the batch, in the plan's order.
        samples: samples of the whole batch.
        summed: the loss is a sum over the batch, so its weights make no mean.

    Raises:
        BatchError: packs logged different keys, or a mean is asked for and nothing says what it is over.
    """
    names = list(packs[0].logs)
    for pack in packs:
        if set(pack.logs) != set(names):
            odd = sorted(set(names) ^ set(pack.logs))
            raise BatchError(
                f"self.log was called with {odd} for some packs of the batch and not for others; one process would log "
                "once for the whole batch. Log the same keys for every pack (NaN-free defaults where there is nothing)."
            )
    for name in names:
        entries = [(pack.logs[name], pack) for pack in packs]
        options = _options(name, [value for value, _ in entries])
        _check_mean(name, entries[0][0], summed=summed)
        sizes = [value.batch_size for value, _ in entries if value.batch_size is not None]
        value = _metric(module, options) if entries[0][0].value is None else _join(name, entries)
        module.log(name, value, batch_size=sum(sizes) if sizes else samples, **options)


def _check_mean(name: str, logged: LoggedValue, *, summed: bool) -> None:
    if summed and logged.value is not None and logged.batch_size is None and _reduction(logged) == "mean":
        raise BatchError(
            f"self.log({name!r}, ...) with loss_normalization='sum': is this value a sum or a mean over the batch? Say "
            "reduce_fx='sum', or give batch_size= for a mean"
        )


def _reduction(logged: LoggedValue) -> str:
    reduce_fx = logged.options.get("reduce_fx", "mean")
    return reduce_fx.lower() if isinstance(reduce_fx, str) else str(reduce_fx.__name__)


def _options(name: str, values: Sequence[LoggedValue]) -> dict[str, Any]:
    first = values[0]
    if any(
        value.options != first.options or (value.batch_size is None) != (first.batch_size is None) for value in values
    ):
        raise BatchError(f"self.log({name!r}, ...) was called with different options for packs of the same batch")
    return dict(first.options)


def _metric(module: LightningModule, options: Mapping[str, Any]) -> Any:
    return module.get_submodule(options["metric_attribute"])


def _join(name: str, entries: Sequence[tuple[LoggedValue, WeightedLogs]]) -> Tensor:
    values = [torch.as_tensor(value.value, dtype=_float_dtype(value.value)).squeeze() for value, _ in entries]
    stacked = torch.stack(values)
    kind = _reduction(entries[0][0])
    if kind in ("sum", "min", "max"):
        return getattr(stacked, kind)()
    return _weighted(stacked, *_weights(entries))


def _float_dtype(value: Any) -> torch.dtype:
    if isinstance(value, Tensor):
        return torch.promote_types(value.dtype, torch.float32)
    return torch.float64


def _weights(entries: Sequence[tuple[LoggedValue, WeightedLogs]]) -> tuple[list[float], float]:
    """Weights of the packs, and what their weighted sum is divided by."""
    if entries[0][0].batch_size is not None:
        weights = [float(value.batch_size or 0) for value, _ in entries]
        return weights, sum(weights)
    weights = [pack.weight for _, pack in entries]
    if any(weights):
        return weights, 1.0
    samples = [float(pack.samples) for _, pack in entries]
    return samples, sum(samples)


def _weighted(values: Tensor, weights: Sequence[float], divisor: float) -> Tensor:
    """The weighted sum over a divisor; a pack without weight does not count, even if its value is NaN."""
    counted = [i for i, weight in enumerate(weights) if weight]
    factors = torch.tensor([weights[i] for i in counted], dtype=torch.float64) / divisor
    return (values[counted].double() * factors).sum().to(values.dtype)
