"""``self.log`` inside a step: recorded once a pack, logged once a batch with the value one process would have."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from numbers import Number
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torchmetrics import Metric

from lightning_dcp.errors import BatchError
from lightning_dcp.step.metric_state import MetricState, value_of_states
from lightning_dcp.step.metrics import noting_calls


@dataclass(frozen=True)
class LoggedValue:
    """One value that a pack logged.

    Attributes:
        value: the value, in the precision that Lightning keeps; None for a torchmetrics object, which keeps its own state.
        batch_size: the weight that the user gave, if any.
        options: the other arguments of ``self.log``.
        state: of a metric object that was called in this pack and is logged on_step: what the call alone gave.
        is_loss: whether the value is the loss that the step returned.
    """

    value: Tensor | None
    batch_size: int | None
    options: Mapping[str, Any] = field(default_factory=dict)
    state: MetricState | None = None
    is_loss: bool = False


PackLogs = dict[str, list[LoggedValue]]
"""What one pack logged, by key, in the order of the calls."""

_SIGNATURE = inspect.signature(LightningModule.log)
# what Lightning takes as reduce_fx; it compares the functions themselves, and names in lower case
_REDUCTIONS: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("mean", ("mean", "avg", torch.mean)),
    ("sum", ("sum", torch.sum, sum)),
    ("min", ("min", torch.min, min)),
    ("max", ("max", torch.max, max)),
)


@contextmanager
def recording(module: LightningModule) -> Iterator[PackLogs]:
    """Collect what the module logs inside, instead of logging it.

    Raises:
        BatchError: inside, a value that is no single number, or an option that has no meaning for parts of a batch.
    """
    logs: PackLogs = {}

    def record(*args: Any, **kwargs: Any) -> None:
        options = dict(_SIGNATURE.bind(module, *args, **kwargs).arguments)
        for handled in ("self", "sync_dist", "sync_dist_group"):  # the joined value is the same on all ranks
            options.pop(handled, None)
        name, value, batch_size = options.pop("name"), options.pop("value"), options.pop("batch_size", None)
        if options.get("enable_graph"):
            raise BatchError(
                f"self.log({name!r}, enable_graph=True): values are joined over packs, which keeps no graph"
            )
        if "reduce_fx" in options:
            options["reduce_fx"] = _reduction_name(name, options["reduce_fx"])
        state = None
        if isinstance(value, Metric):
            options["metric_attribute"] = options.get("metric_attribute") or _attribute_of(module, name, value)
            if _on_step(options, in_training=bool(module.trainer.training)):
                state = calls.state(value)
        number = None if isinstance(value, Metric) else _number(name, value)
        logs.setdefault(name, []).append(LoggedValue(number, batch_size, options, state))

    # An attribute of the instance, so that log_dict and calls from callbacks go the same way.
    module.log = record  # type: ignore[method-assign]
    try:
        with noting_calls(module) as calls:
            yield logs
    finally:
        del module.log


def _on_step(options: Mapping[str, Any], *, in_training: bool) -> bool:
    on_step = options.get("on_step")
    return in_training if on_step is None else bool(on_step)  # Lightning's default in training_step is on_step=True


def _reduction_name(name: str, reduce_fx: Any) -> str:
    """The reduction by name: options are sent between ranks, and not every function can be."""
    given = reduce_fx.lower() if isinstance(reduce_fx, str) else reduce_fx
    for reduction, accepted in _REDUCTIONS:
        if any(given is each or (isinstance(given, str) and given == each) for each in accepted):
            return reduction
    raise BatchError(
        f"self.log({name!r}, reduce_fx={reduce_fx!r}): Lightning knows mean, sum, min and max (or torch.mean and so on). "
        "Give one of these, or log a torchmetrics object, which reduces as it likes"
    )


def _number(name: str, value: Any) -> Tensor:
    """A scalar on the CPU, in the dtype that Lightning would keep it in."""
    if not isinstance(value, (Tensor, Number)):
        raise BatchError(
            f"self.log({name!r}, ...) got a {type(value).__name__}; log a number, a tensor or a metric object"
        )
    default = torch.promote_types(torch.get_default_dtype(), torch.float32)
    if not isinstance(value, Tensor):
        return torch.tensor(value, dtype=default)
    if value.numel() != 1:
        raise BatchError(f"self.log({name!r}, ...) got a tensor of shape {list(value.shape)}; log a single element")
    kept = value.dtype in (torch.float32, torch.float64)
    return value.detach().squeeze().to("cpu", value.dtype if kept else default)


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

    A value is weighted like the loss, or by ``batch_size`` where the user gave it and the value is not the loss itself. Over
    an epoch Lightning weighs batches by ``batch_size``: the user's, added up, or the number of samples.

    With ``reduce_fx`` sum, min or max the values of the packs are added up, or the least or greatest is taken. That is what
    one process logs if the value is itself a sum, minimum or maximum over the batch (``lengths.max()`` with ``"max"``). It
    is not if the value is a mean: Lightning reduces over batches only, so one process logs the batch's mean, whose maximum
    over the epoch is taken; here it is the greatest mean of a pack, which depends on how the batch was cut.

    A NaN from a pack without weight (the mean over no targets) does not count, whatever the reduction, as long as another
    pack of the batch has weight.

    Args:
        module: the user's module.
        packs: of all packs of the batch, in the plan's order.
        samples: samples of the whole batch.
        summed: the loss is a sum over the batch, so its weights make no mean.

    Raises:
        BatchError: packs logged different keys, or a mean is asked for and nothing says what it is over.
    """
    counts = [{name: len(calls) for name, calls in pack.logs.items()} for pack in packs]
    if any(count != counts[0] for count in counts):
        raise BatchError(_different_keys(counts))
    for name, times in counts[0].items():
        for i in range(times):
            _replay_one(module, name, [(pack.logs[name][i], pack) for pack in packs], samples, summed=summed)


def _different_keys(counts: Sequence[Mapping[str, int]]) -> str:
    odd = sorted(
        {name for count in counts for name in counts[0].keys() | count.keys() if count.get(name) != counts[0].get(name)}
    )
    return (
        f"self.log was called with {odd} for some packs of the batch and not for others (or not as often); one process would "
        "log once for the whole batch. Log the same keys for every pack (NaN-free defaults where there is nothing). That "
        "goes for rank_zero_only=True as well: call self.log on every rank, whose packs are parts of one batch."
    )


Entry = tuple[LoggedValue, WeightedLogs]
"""What one pack logged under a name, and the pack."""


def _replay_one(module: LightningModule, name: str, entries: Sequence[Entry], samples: int, *, summed: bool) -> None:
    options = _options(name, [value for value, _ in entries])
    _check_mean(name, entries[0][0], summed=summed)
    sizes = [value.batch_size for value, _ in entries if value.batch_size is not None]
    if sizes and not summed and entries[0][0].value is not None:
        _warn_of_rows(name, entries)
    value = _metric(module, entries) if entries[0][0].value is None else join_values(entries)
    module.log(name, value, batch_size=sum(sizes) if sizes else samples, **options)


def _metric(module: LightningModule, entries: Sequence[Entry]) -> Metric:
    """The metric object, which holds the value of the batch where Lightning looks for it.

    Without a call in the step there is no such value, as in Lightning.
    """
    metric: Any = module.get_submodule(entries[0][0].options["metric_attribute"])
    states = [value.state for value, _ in entries if value.state is not None]
    metric._forward_cache = value_of_states(metric, states) if states else None
    return metric


def _check_mean(name: str, logged: LoggedValue, *, summed: bool) -> None:
    if summed and logged.value is not None and logged.batch_size is None and _reduction(logged) == "mean":
        raise BatchError(
            f"self.log({name!r}, ...) with loss_normalization='sum': is this value a sum or a mean over the batch? Say "
            "reduce_fx='sum', or give batch_size= for a mean"
        )


def _reduction(logged: LoggedValue) -> str:
    return str(logged.options.get("reduce_fx", "mean"))


def _options(name: str, values: Sequence[LoggedValue]) -> dict[str, Any]:
    first = values[0]
    if any(
        value.options != first.options or (value.batch_size is None) != (first.batch_size is None) for value in values
    ):
        raise BatchError(f"self.log({name!r}, ...) was called with different options for packs of the same batch")
    return dict(first.options)


def mark_loss(logs: PackLogs, loss: Tensor | None) -> None:
    """Mark the values that are the step's loss: these are weighted like it, whatever ``batch_size`` says.

    Args:
        logs: what the step logged.
        loss: what it returned, a scalar; None if it returned none.
    """
    if loss is None:
        return
    for name, values in logs.items():
        logs[name] = [replace(value, is_loss=_is_same(value.value, loss)) for value in values]


def _is_same(value: Tensor | None, loss: Tensor) -> bool:
    if value is None or value.dim():
        return False
    return torch.equal(value.double().nan_to_num(), loss.detach().cpu().double().nan_to_num())


def _warn_of_rows(name: str, entries: Sequence[Entry]) -> None:
    """Say what ``batch_size=len(batch)`` does: the commonest way to log a loss, which is a mean over tokens."""
    rows = all(value.batch_size == pack.samples for value, pack in entries)
    weights, samples = [pack.weight for _, pack in entries], sum(pack.samples for _, pack in entries)
    shares = [pack.samples / samples for _, pack in entries]
    differ = any(abs(weight - share) > 1e-6 for weight, share in zip(weights, shares, strict=True))
    if rows and differ and not all(value.is_loss for value, _ in entries) and _reduction(entries[0][0]) == "mean":
        rank_zero_warn(
            f"self.log({name!r}, ..., batch_size=) with the number of samples: the packs of a batch are joined as a mean over "
            "samples. If the value is a mean over tokens, as the loss is, leave batch_size out, or give the number of targets."
        )


def join_values(entries: Sequence[Entry]) -> Tensor:
    """One value of the values that packs (or parts of packs) logged in one call each."""
    counted = _counted(entries)
    stacked = torch.stack([value.value for value, _ in counted if value.value is not None])
    kind = _reduction(counted[0][0])
    if kind in ("sum", "min", "max"):
        return getattr(stacked, kind)()
    return _weighted(stacked, *_weights(counted))


def _counted(entries: Sequence[Entry]) -> Sequence[Entry]:
    """All entries but the NaN ones without weight: a mean over nothing, which one process would not have taken."""
    weightless = [not pack.weight or value.batch_size == 0 for value, pack in entries]
    if all(weightless):
        return entries
    pairs = zip(entries, weightless, strict=True)
    return [entry for entry, empty in pairs if not (empty and _is_nan(entry[0].value))]


def _is_nan(value: Tensor | None) -> bool:
    return value is not None and bool(value.isnan())


def _weights(entries: Sequence[Entry]) -> tuple[list[float], float]:
    """Weights of the packs, and what their weighted sum is divided by."""
    if entries[0][0].batch_size is not None and not all(value.is_loss for value, _ in entries):
        weights = [float(value.batch_size or 0) for value, _ in entries]
        if any(weights):
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
