"""Whether a step gives the same with sharded outputs as with whole samples: tried on one pack."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_dcp.errors import BatchError
from lightning_dcp.parallel.clock import WaitClock
from lightning_dcp.parallel.gradients import all_reduce_gradients
from lightning_dcp.step.logs import WeightedLogs, join_values
from lightning_dcp.step.scheduled import PackWork

OutputsMode = Literal["gathered", "sharded", "auto"]
PATIENCE = timedelta(seconds=60)
"""How long a rank on which the sharded step failed waits for the others of its group to fail as well."""


@dataclass
class OutputsChoice:
    """What steps see: whole samples (gathered), or one rank's tokens (sharded).

    Attributes:
        wanted: what the user asked for.
        tolerance: relative, of the gradient; the loss is compared by its own dtype.
        sharded: what is in force; None until a pack on several ranks has been tried both ways.
        trials: batches in which a trial was made.
    """

    wanted: OutputsMode = "gathered"
    tolerance: float = 1e-4
    sharded: bool | None = None
    trials: int = 0

    def __post_init__(self) -> None:
        if self.wanted == "gathered":
            self.sharded = False

    def settle(self, verdicts: Sequence[str | None]) -> None:
        """Decide by what the ranks found in one batch: None for no trial, "" for agreement, else why not.

        Raises:
            BatchError: sharded outputs were asked for, and do not agree.
        """
        found = [verdict for verdict in verdicts if verdict is not None]
        if not found:
            return
        reasons = [verdict for verdict in found if verdict]
        self.trials += 1
        self.sharded = not reasons
        if reasons and self.wanted == "sharded":
            raise BatchError(
                f"outputs='sharded': {reasons[0]}. Use batch['shift_labels'] as targets (labels cannot be shifted on a shard), "
                "losses that are means or sums over tokens, and log such values; or use outputs='gathered'"
            )
        chosen = "sharded: loss, logged values and gradient agree" if self.sharded else f"gathered: {reasons[0]}"
        rank_zero_info(f"Outputs of training_step's regions are {chosen}")


def gradient_tolerance(precision: object) -> float:
    """How much gradients may differ, as a share of their norm, at a precision of Lightning's: both ways compute the same
    forward inside regions, so only the rounding of gradients tells them apart.
    """
    exact = {"64-true": 1e-9, "32-true": 1e-4, "32": 1e-4, "64": 1e-9}
    return exact.get(str(precision), 2e-2)


GATHERED = OutputsChoice()
"""For steps that always see whole samples."""


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
    choice: OutputsChoice,
    clock: WaitClock,
) -> str:
    """Run one pack once more, sharded, after it was run in whole samples; why they disagree, or "".

    The gradients that the gathered run left on the parameters stay there.

    Args:
        work: the pack in whole samples.
        run: runs a pack with its backward, and forgets what it logs and counts; called twice.
        shard: makes the pack's sharded form.
        parameters: all of the module.
        choice: tolerances, and what the user wanted.
        clock: where waiting is counted.

    Raises:
        Exception: what the sharded run raised on this rank while other ranks of the group went on.
    """
    handle = work.active.context.group.handle
    own = [p.grad for p in parameters]
    try:
        gathered, whole = _gradients_of(run, work, parameters)
        reason, parts, sharded = "", None, None
        with _agreed_failure(work, choice) as failure:
            sharded, parts = _gradients_of(run, shard(work), parameters)
        reason = failure.reason
        every: list[Any] = [None] * work.pack.cp_size
        with clock.waiting():
            dist.all_gather_object(every, (gathered, sharded, reason), group=handle)
        reason = next((text for _, _, text in every if text), "") or _differences(every)
        if reason or parts is None:
            return reason
        return _gradient_difference(whole, parts, parameters, choice.tolerance, handle, clock)
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


@contextmanager
def _agreed_failure(work: PackWork, choice: OutputsChoice) -> Iterator[_Failure]:
    """Turn an exception into a reason, if all ranks of the group come to the end of their attempts, too."""
    ranks = work.active.context.group.global_ranks
    store = dist.distributed_c10d._get_default_store()
    keys = [f"lightning_dcp/outputs/{choice.trials}/{work.number}/{rank}" for rank in ranks]
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
    outputs = [_numbers(part.output) for part in parts]
    for name, value in _numbers(whole.output).items():
        if value.dim():
            return "training_step returns a tensor that is no scalar"
        counted = [
            (part.logs.weight, numbers[name]) for part, numbers in zip(parts, outputs, strict=True) if part.logs.weight
        ]
        ours = sum((number.double() * weight for weight, number in counted), torch.zeros((), dtype=torch.float64))
        reason = _difference(f"the output {name or 'loss'}", value * whole.logs.weight, ours.to(value.dtype))
        if reason:
            return reason
    return ""


def _logs_differ(whole: WeightedLogs, parts: Sequence[WeightedLogs]) -> str:
    counts = {tuple(sorted((name, len(values)) for name, values in logs.logs.items())) for logs in (whole, *parts)}
    if len(counts) > 1:
        return f"different keys are logged: {sorted({name for each in counts for name, _ in each})}"
    for name, values in whole.logs.items():
        for number, logged in enumerate(values):
            if logged.value is not None:
                ours = join_values([(part.logs[name][number], part) for part in parts])
                reason = _difference(f"the logged {name!r}", join_values([(logged, whole)]), ours)
                if reason:
                    return reason
    return ""


def _difference(name: str, whole: Tensor, parts: Tensor) -> str:
    tolerance = {torch.float64: 1e-9, torch.float32: 1e-5}.get(whole.dtype, 1e-2)
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
) -> str:
    """Compare the sums over the group, in the 2-norm of all parameters together."""
    for parameter, a, b in zip(parameters, whole, parts, strict=True):
        parameter.grad = None if a is None and b is None else _or_zero(a, parameter) - _or_zero(b, parameter)
    difference = _summed_norm(parameters, group, clock)
    for parameter, a in zip(parameters, whole, strict=True):
        parameter.grad = None if a is None else a.clone()
    size = _summed_norm(parameters, group, clock)
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
