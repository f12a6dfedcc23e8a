"""Temperatures: one number, or one for each sample or token."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lightning_dcp.errors import Problem


def temperature_problems(temperature: float | Tensor, targets: Tensor, *, fused: bool) -> list[Problem]:
    """What is wrong with a temperature: its shape, its values, or that the fused way cannot have it.

    Args:
        temperature: a number; a tensor of one element, of the shape of ``targets`` (dimensions of size 1 do not
            count), or of its first dimensions, such as ``[B]`` for ``[B, T]``.
        targets: ``[...]``.
        fused: whether one number must do for all tokens.
    """
    values = temperature.detach() if isinstance(temperature, Tensor) else torch.tensor(temperature, dtype=torch.float64)
    asked = f"temperature={temperature if not isinstance(temperature, Tensor) else f'a tensor {list(values.shape)}'}"
    if values.is_complex() or values.dtype == torch.bool:
        return [Problem(asked, f"numbers of {values.dtype}", "give real numbers")]
    if values.numel() != 1 and _by_token(values, targets) is None:
        remedy = "give one number, or one for each sample or each token"
        return [Problem(asked, f"targets {list(targets.shape)}, which it does not fit", remedy)]
    if values.numel() == 0:
        return []
    least, most = (float(bound) for bound in values.aminmax())
    if not (least > 0 and math.isfinite(most)):
        return [Problem(asked, f"values from {least:g} to {most:g}", "give temperatures above 0, and finite")]
    if not fused:
        return []
    if least != most:
        found = f"values from {least:g} to {most:g}; fused=True divides all logits by one number"
        return [Problem(asked, found, "pass fused=False, which makes all logits, or pack samples of one temperature")]
    if isinstance(temperature, Tensor) and temperature.requires_grad and torch.is_grad_enabled():
        found = "it requires a gradient, and fused=True gives none to it"
        return [Problem(asked, found, "pass fused=False, which makes all logits, or detach the temperature")]
    return []


def one_temperature(temperature: float | Tensor) -> float:
    """The number that all elements are, once :func:`temperature_problems` has found nothing; 1 if there are none."""
    if not isinstance(temperature, Tensor):
        return float(temperature)
    return float(temperature.detach().reshape(-1)[0]) if temperature.numel() else 1.0


def token_temperatures(temperature: float | Tensor, targets: Tensor, device: torch.device) -> Tensor | None:
    """One temperature a token, ``[T]`` on the device and differentiable; None if it is a plain number."""
    if not isinstance(temperature, Tensor):
        return None
    if temperature.numel() == 1:
        return temperature.reshape(1).expand(targets.numel()).to(device)
    by_token = _by_token(temperature, targets)
    return None if by_token is None else by_token.to(device)


def _by_token(temperature: Tensor, targets: Tensor) -> Tensor | None:
    if _without_ones(temperature) == _without_ones(targets):
        return temperature.reshape(-1)
    leading = temperature.shape[: targets.dim()]
    while leading and leading[-1] == 1:
        leading = leading[:-1]
    if temperature.numel() != leading.numel() or leading != targets.shape[: len(leading)]:
        return None
    trailing = (1,) * (targets.dim() - len(leading))
    return temperature.reshape(*leading, *trailing).expand(targets.shape).reshape(-1)


def _without_ones(x: Tensor) -> list[int]:
    return [size for size in x.shape if size != 1]
