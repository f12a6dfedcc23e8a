"""The arguments of a call: checked all at once, and brought into one shape."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dcp.errors import Problem, raise_problems
from lightning_dcp.loss.linear_cross_entropy.call import LossCall
from lightning_dcp.loss.linear_cross_entropy.kernels import (
    AUTO,
    TORCH,
    choose_loss_kernel,
    kernel_problems,
    loss_kernel_names,
)
from lightning_dcp.loss.linear_cross_entropy.logits import LogitTransform
from lightning_dcp.loss.linear_cross_entropy.objective import REDUCTIONS, Objective
from lightning_dcp.loss.linear_cross_entropy.statistics import Head, automatic_chunk
from lightning_dcp.loss.linear_cross_entropy.temperature import (
    one_temperature,
    temperature_problems,
    token_temperatures,
)
from lightning_dcp.loss.linear_cross_entropy.vocabulary import group_problems, membership_problems

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Arguments:
    """A call as the user wrote it; see :func:`~lightning_dcp.loss.linear_cross_entropy.linear_cross_entropy`."""

    hidden: Tensor
    weight: Tensor
    targets: Tensor
    bias: Tensor | None
    temperature: float | Tensor
    token_weights: Tensor | None
    ignore_index: int
    softcap: float | None
    logit_scale: float
    objective: Objective
    fused: bool
    chunk_tokens: int | None
    kernel: str
    tp_group: ProcessGroup | None
    entropy: bool
    logsumexp: bool


@dataclass(frozen=True)
class Inputs:
    """A call that can be computed.

    Attributes:
        hidden: ``[T, H]``.
        weight: ``[V, H]``; with a group, this rank's rows.
        bias: ``[V]`` or None.
        labels: int64 ``[T]``, ids of the whole vocabulary, -1 where there is no target; no view of the user's tensor.
        head: how to compute.
        temperatures: ``[T]``, where they are not one number.
        kernel: by which.
        group: over which the vocabulary is shared out.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    labels: Tensor
    head: Head
    temperatures: Tensor | None
    kernel: str
    group: ProcessGroup | None


def prepare(arguments: Arguments) -> Inputs:
    """Check a call and bring it into one shape.

    Raises:
        ConfigurationError: all that is wrong with the arguments, and with a group, with those of its other ranks.
    """
    if arguments.tp_group is not None:
        raise_problems(membership_problems(arguments.tp_group))
    dtype = compute_dtype(arguments.hidden)
    problems = _option_problems(arguments) + _dtype_problems(arguments, dtype) + _layout_problems(arguments)
    if not problems and arguments.fused:
        problems += kernel_problems(_call(arguments, dtype, _transform(arguments)), arguments.kernel)
    if arguments.tp_group is not None:
        group, targets = arguments.tp_group, arguments.targets
        problems += group_problems(group, arguments.hidden, arguments.weight, targets, problems)
    raise_problems(problems)
    valid = arguments.targets != arguments.ignore_index
    labels = torch.where(valid, arguments.targets, -1).long().reshape(-1)
    return _inputs(arguments, labels, dtype)


def compute_dtype(hidden: Tensor) -> torch.dtype:
    """What ``torch.nn.functional.linear`` would multiply in, autocast included."""
    device = hidden.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device) and hidden.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return hidden.dtype


def _inputs(arguments: Arguments, labels: Tensor, dtype: torch.dtype) -> Inputs:
    uniform = arguments.fused or not isinstance(arguments.temperature, Tensor)
    transform = _transform(arguments)
    rows, tokens = len(arguments.weight), arguments.targets.numel()
    chunk = arguments.chunk_tokens or automatic_chunk(rows, dtype, arguments.hidden.device, tokens)
    smoothed = arguments.objective.label_smoothing > 0
    call = _call(arguments, dtype, transform)
    # Other packages divide by the number of targets and launch over them: without any, own code serves every call.
    by_torch = not arguments.fused or not bool((labels >= 0).any())
    return Inputs(
        arguments.hidden.reshape(-1, arguments.hidden.shape[-1]),
        arguments.weight,
        arguments.bias,
        labels,
        Head(transform, dtype, chunk, arguments.entropy, smoothed),
        None if uniform else token_temperatures(arguments.temperature, arguments.targets, arguments.hidden.device),
        TORCH if by_torch else choose_loss_kernel(call, arguments.kernel),
        arguments.tp_group,
    )


def _transform(arguments: Arguments) -> LogitTransform:
    temperature = one_temperature(arguments.temperature)
    return LogitTransform(float(arguments.logit_scale), arguments.softcap, temperature)


def _call(arguments: Arguments, dtype: torch.dtype, transform: LogitTransform) -> LossCall:
    head = [arguments.weight] + ([] if arguments.bias is None else [arguments.bias])
    return LossCall(
        device=arguments.hidden.device.type,
        dtype=dtype,
        transform=transform,
        objective=arguments.objective,
        bias=arguments.bias is not None,
        token_weights=arguments.token_weights is not None,
        entropy=arguments.entropy,
        logsumexp=arguments.logsumexp,
        chunk_tokens=arguments.chunk_tokens is not None,
        tp_group=arguments.tp_group is not None,
        hidden_grad=torch.is_grad_enabled() and arguments.hidden.requires_grad,
        head_grad=torch.is_grad_enabled() and any(x.requires_grad for x in head),
    )


def _option_problems(a: Arguments) -> list[Problem]:
    smoothing, z_loss, chunk = a.objective.label_smoothing, a.objective.z_loss, a.chunk_tokens
    checks = {
        ("kernel", repr(a.kernel), f"one of {', '.join(loss_kernel_names())}"): a.kernel in loss_kernel_names(),
        ("reduction", repr(a.objective.reduction), f"one of {', '.join(REDUCTIONS)}"): a.objective.reduction
        in REDUCTIONS,
        ("label_smoothing", smoothing, "a number from 0 to 1"): 0 <= smoothing <= 1,
        ("z_loss", z_loss, "a finite number of at least 0"): 0 <= z_loss < math.inf,
        ("softcap", a.softcap, "a finite number above 0, or None"): a.softcap is None or 0 < a.softcap < math.inf,
        ("logit_scale", a.logit_scale, "a finite number other than 0"): math.isfinite(a.logit_scale)
        and a.logit_scale != 0,
        ("chunk_tokens", chunk, "a whole number above 0, or None"): chunk is None
        or (isinstance(chunk, int) and chunk > 0),
    }
    problems = [
        Problem(f"{name}={value}", "a value that has no meaning", f"give {allowed}")
        for (name, value, allowed), holds in checks.items()
        if not holds
    ]
    for name, given in (("chunk_tokens", chunk is not None), (f"kernel={a.kernel!r}", a.kernel not in (AUTO, TORCH))):
        if given and not a.fused:
            problems.append(Problem(name, "fused=False, which makes all logits at once", f"drop {name} or fused=False"))
    return problems


def _layout_problems(a: Arguments) -> list[Problem]:
    tensors = _tensors(a).values()
    if any(x.is_nested for x in tensors):
        return [Problem("tensors of one shape", "nested ones", "pass .values() of nested tensors")]
    return _shape_problems(a) + ([] if any(x.is_meta for x in tensors) else _value_problems(a))


def _shape_problems(a: Arguments) -> list[Problem]:
    if a.weight.dim() != 2 or not a.weight.numel() or a.hidden.dim() == 0:
        found = f"hidden {list(a.hidden.shape)}, weight {list(a.weight.shape)}"
        return [Problem("hidden [..., H] and weight [V, H]", found, "pass the weight of the head, as nn.Linear has it")]
    rows, width = a.weight.shape
    tokens = list(a.hidden.shape[:-1])
    wanted = {
        "hidden": [*tokens, width],
        "targets": tokens,
        "bias": [rows],
        "token_weights": tokens,
    }
    return [
        Problem(f"{name} {shape}", f"{name} {list(x.shape)}", f"with hidden {list(a.hidden.shape)} and weight "
                f"{[rows, width]}, pass {name} of shape {shape}")
        for name, shape in wanted.items()
        if (x := _tensors(a).get(name)) is not None and list(x.shape) != shape
    ]  # fmt: skip


def _tensors(a: Arguments) -> dict[str, Tensor]:
    given = {
        "hidden": a.hidden,
        "weight": a.weight,
        "targets": a.targets,
        "bias": a.bias,
        "token_weights": a.token_weights,
        "temperature": a.temperature if isinstance(a.temperature, Tensor) else None,
    }
    return {name: x for name, x in given.items() if x is not None}


def _dtype_problems(a: Arguments, dtype: torch.dtype) -> list[Problem]:
    problems = []
    after = {name: compute_dtype(x) for name, x in _tensors(a).items() if name in ("hidden", "weight", "bias")}
    if set(after.values()) != {dtype} or not dtype.is_floating_point:
        found = ", ".join(f"{name} {x}" for name, x in after.items())
        problems.append(
            Problem("hidden, weight and bias of one floating dtype", found, "convert them, or use autocast")
        )
    if a.targets.is_floating_point() or a.targets.is_complex() or a.targets.dtype == torch.bool:
        problems.append(Problem("targets: ids of words", f"{a.targets.dtype}", "pass int64"))
    if a.token_weights is not None and a.token_weights.is_complex():
        problems.append(Problem("token_weights: real numbers", f"{a.token_weights.dtype}", "pass a floating dtype"))
    devices = {name: str(x.device) for name, x in _tensors(a).items()}
    devices = {name: device for name, device in devices.items() if not (name == "temperature" and device == "cpu")}
    if len(set(devices.values())) > 1 or "meta" in devices.values():
        found = ", ".join(f"{name} on {device}" for name, device in devices.items())
        problems.append(Problem("all tensors on one device that holds data", found, "move them"))
    return problems


def _value_problems(a: Arguments) -> list[Problem]:
    problems = temperature_problems(a.temperature, a.targets, fused=a.fused)
    counted = a.targets[a.targets != a.ignore_index]
    if a.weight.dim() != 2 or counted.is_floating_point() or not counted.numel():
        return problems
    vocabulary = len(a.weight) * (1 if a.tp_group is None else dist.get_world_size(a.tp_group))
    if counted.min() < 0 or counted.max() >= vocabulary:
        found = f"from {int(counted.min())} to {int(counted.max())}"
        remedy = f"set targets that do not count to ignore_index ({a.ignore_index}), and check the vocabulary"
        problems.append(Problem(f"targets from 0 to {vocabulary - 1}", found, remedy))
    return problems
