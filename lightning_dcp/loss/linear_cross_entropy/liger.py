"""Liger's fused linear cross-entropy, for CUDA."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lightning_dcp.loss.linear_cross_entropy.call import LossCall, entry_point
from lightning_dcp.loss.linear_cross_entropy.matmul import HALF
from lightning_dcp.loss.linear_cross_entropy.objective import Objective

NAME = "liger"


@cache
def _function() -> Callable[..., Any] | str:
    """The function, or why there is none; looked up once a process."""
    module = "liger_kernel.transformers.functional"
    found = entry_point("liger-kernel", module, "liger_fused_linear_cross_entropy")
    if not isinstance(found, str) and "accum_dtype" not in inspect.signature(found).parameters:
        return "the package liger-kernel is too old: it adds up weight gradients in half precision; take 0.6.2 or later"
    return found


def refusals(call: LossCall) -> list[str]:
    """Every reason why Liger cannot serve a call; empty if it can."""
    reasons = call.common_refusals((torch.float32, *HALF))
    if call.objective.reduction == "none":
        reasons.append("its releases up to 0.7 scale all gradients of per-token losses by that of the first token")
    if call.token_weights:
        reasons.append("it has no token_weights")
    if call.head_grad and not call.hidden_grad:
        reasons.append("it gives weight and bias no gradient where the hidden states need none")
    found = _function()
    return [*reasons, found] if isinstance(found, str) else reasons


def liger_loss(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, softcap: float | None, objective: Objective
) -> Tensor:
    """The reduced loss by Liger: a scalar in float32.

    Only ever run against stand-ins with the signature of liger-kernel 0.6.2 to 0.8.5, for want of a GPU. Logits are
    rounded to the operands' dtype, statistics and weight gradients are float32. The gradient is computed in the forward.

    Args:
        hidden: ``[T, H]``.
        weight: ``[V, H]``, of the dtype of ``hidden``.
        bias: ``[V]`` or None.
        labels: int64 ``[T]``, -1 where there is no target; at least one token has one.
        softcap: the bound of logits, or None.
        objective: its reduction is ``sum`` or ``mean``.

    Raises:
        RuntimeError: Liger is not there; :func:`refusals` says so first.
    """
    function = _function()
    if isinstance(function, str):
        raise RuntimeError(function)
    return function(
        input=hidden.contiguous(),
        weight=weight.contiguous(),
        target=labels,
        bias=bias,
        ignore_index=-1,
        lse_square_scale=objective.z_loss,
        label_smoothing=objective.label_smoothing,
        reduction=objective.reduction,
        softcap=softcap,
        accum_dtype=torch.float32,
    )
