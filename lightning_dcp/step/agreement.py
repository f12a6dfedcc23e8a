"""Whether a step gives the same with sharded outputs as with whole samples: tried on one pack."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_dcp.parallel.clock import WaitClock
from lightning_dcp.parallel.gradients import all_reduce_gradients
from lightning_dcp.step.logs import WeightedLogs, join_values
from lightning_dcp.step.scheduled import PackWork

PATIENCE = timedelta(seconds=60)
"""How long a rank on which the sharded step failed waits for the others of its group to fail as well."""


@dataclass(frozen=True)
class Attempt:
    """What one way of running a pack gave, on one rank.

    Attributes:
        output: what the step returned, as numbers.
        logs: what it logged, with the weight of this rank's loss.
        metrics: updates of torchmetrics objects.
    """

    output: Any
    logs: WeightedLogs
    metrics: int = 0


RunPack = Callable[[PackWork], Attempt]
Shard = Callable[[PackWork], PackWork]


def compare(
    work: PackWork,
    run: RunPack,
    shard: Shard,
    parameters: Sequence[nn.Parameter],
    tolerance: float,
    clock: WaitClock,
) -> str | None:
    """Run one pack twice more, in whole samples and sharded; why they disagree, or "", or None if nothing can be said.

    The gradients that the gathered run left on the parameters stay there.

    Args:
        work: the pack in whole samples.
        run: runs a pack with its backward, and forgets what it logs and counts; called twice.
        shard: makes the pack's sharded form.
        parameters: all of the module.
        tolerance: of the gradient, as a share of its norm.
        clock: where waiting is counted.

    Raises:
        Exception: what the sharded run raised on this rank while other ranks of the group went on.
    """
    handle = work.active.context.group.handle
    own = [p.grad for p in parameters]
    _forget_failures(work)
    try:
        gathered, whole = _gradients_of(run, work, parameters)
        reason, parts, sharded = "", None, None
        with _agreed_failure(work) as failure:
            sharded, parts = _gradients_of(run, shard(work), parameters)
        reason = failure.reason
        every: list[Any] = [None] * work.pack.cp_size
        with clock.waiting():
            dist.all_gather_object(every, (gathered, sharded, reason), group=handle)
        reason = next((text for _, _, text in every if text), "") or _differences(every)
        if reason or parts is None:
            return reason
        return _gradient_difference(whole, parts, parameters, tolerance, handle, clock)
    finally:
        for parameter, gradient in zip(parameters, own, strict=True):
            parameter.grad = gradient


Gradients = list[Tensor | None]


def _gradients_of(run: RunPack, work: PackWork, parameters: Sequence[nn.Parameter]) -> tuple[Attempt, Gradients]:
    for parameter in parameters:
        parameter.grad = None
    attempt = run(work)
    return attempt, [parameter.grad for parameter in parameters]


@dataclass
class _Failure:
    reason: str = ""


def _store_and_keys(work: PackWork) -> tuple[Any, list[str]]:
    """Where the ranks of a group leave word of how their attempts ended, and the key of each."""
    group = work.active.context.group.global_ranks
    name = f"{group[0]}-{group[-1]}"
    return dist.distributed_c10d._get_default_store(), [f"lightning_dcp/outputs/{name}/{rank}" for rank in group]


def _forget_failures(work: PackWork) -> None:
    """Take back what this rank said in an earlier trial.

    All ranks of the group do so before any is through the attempt in whole samples, in whose collectives they meet.
    """
    store, keys = _store_and_keys(work)
    store.delete_key(keys[work.active.context.rank])


@contextmanager
def _agreed_failure(work: PackWork) -> Iterator[_Failure]:
    """Turn an exception into a reason, if all ranks of the group come to the end of their attempts, too."""
    store, keys = _store_and_keys(work)
    own, failure = keys[work.active.context.rank], _Failure()
    try:
        yield failure
        store.set(own, "done")
    except Exception as error:
        store.set(own, "failed")
        try:
            store.wait(keys, PATIENCE)
        except Exception:  # others went on without this rank, and wait for it: the run has to end
            raise error from None
        failure.reason = f"the step fails with a part of the tokens ({type(error).__name__}: {error})"


def _differences(every: Sequence[tuple[Attempt, Attempt, str]]) -> str:
    """What differs between the outputs and logged values of a group's ranks: the first rank's whole ones, all ranks' parts."""
    whole, parts = every[0][0], [part for _, part, _ in every]
    if whole.metrics:
        return "torchmetrics objects are updated in the step, which may count samples"
    reason = _logs_differ(whole.logs, [part.logs for part in parts])
    if reason:
        return reason
    outputs, expected = [_numbers(part.output) for part in parts], _numbers(whole.output)
    if any(numbers.keys() != expected.keys() for numbers in outputs):
        return f"training_step returns other values: {sorted(set(expected).symmetric_difference(*outputs))}"
    for name, value in expected.items():
        if value.dim():
            return "training_step returns a tensor that is no scalar"
        counted = [
            (part.logs.weight, numbers[name]) for part, numbers in zip(parts, outputs, strict=True) if part.logs.weight
        ]
        ours = sum((number.double() * weight for weight, number in counted), torch.zeros((), dtype=torch.float64))
        reason = _difference(f"the output {name or 'loss'}", value.double() * whole.logs.weight, ours, value.dtype)
        if reason:
            return reason
    return ""


def _logs_differ(whole: WeightedLogs, parts: Sequence[WeightedLogs]) -> str:
    counts = {tuple(sorted((name, len(values)) for name, values in logs.logs.items())) for logs in (whole, *parts)}
    if len(counts) > 1:
        return f"different keys are logged: {sorted({name for each in counts for name, _ in each})}"
    for name, values in whole.logs.items():
        for number, logged in enumerate(values):
            sizes = [part.logs[name][number].batch_size or 0 for part in parts]
            if sum(sizes) != (logged.batch_size or 0):
                return f"the batch_size of the logged {name!r} differs: {sum(sizes)} of parts, {logged.batch_size} of the whole"
            if logged.value is not None:
                ours = join_values([(part.logs[name][number], part) for part in parts])
                own = join_values([(logged, whole)])
                reason = _difference(f"the logged {name!r}", own, ours, own.dtype)
                if reason:
                    return reason
    return ""


def _difference(name: str, whole: Tensor, parts: Tensor, dtype: torch.dtype) -> str:
    """Why two numbers differ that were computed in this dtype; whole numbers are exact."""
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}.get(dtype, 1e-9)
    if torch.allclose(parts.double(), whole.double(), rtol=tolerance, atol=tolerance * 1e-3):
        return ""
    return f"{name} differs: {float(parts):.8g} of parts, {float(whole):.8g} of whole samples, each by its weight"


def _numbers(output: Any) -> dict[str, Tensor]:
    leaves, _ = pytree.tree_flatten_with_path(output)
    return {
        pytree.keystr(path): torch.as_tensor(value) for path, value in leaves if isinstance(value, Tensor | float | int)
    }


def _gradient_difference(
    whole: Gradients,
    parts: Gradients,
    parameters: Sequence[nn.Parameter],
    tolerance: float,
    group: dist.ProcessGroup | None,
    clock: WaitClock,
) -> str | None:
    """Compare the sums over the group, in the 2-norm of all parameters together; None if one is not finite."""
    for parameter, a, b in zip(parameters, whole, parts, strict=True):
        parameter.grad = None if a is None and b is None else _or_zero(a, parameter) - _or_zero(b, parameter)
    difference = _summed_norm(parameters, group, clock)
    for parameter, a in zip(parameters, whole, strict=True):
        parameter.grad = None if a is None else a.clone()
    size = _summed_norm(parameters, group, clock)
    if not (math.isfinite(difference) and math.isfinite(size)):
        return None  # an overflow that a gradient scaler would answer; another pack will tell
    if difference <= tolerance * max(size, 1e-30):
        return ""
    return f"the gradient differs by {difference / max(size, 1e-30):.2g} of its norm"


def _or_zero(gradient: Tensor | None, parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if gradient is None else gradient


def _summed_norm(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup | None, clock: WaitClock) -> float:
    if group is not None:
        all_reduce_gradients(parameters, group, clock)
    norms = [p.grad.double().norm() for p in parameters if p.grad is not None]
    return float(torch.stack([n.cpu() for n in norms]).norm()) if norms else 0.0
