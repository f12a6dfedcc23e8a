"""Apple's Cut Cross-Entropy (arXiv:2411.09009), for CUDA."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from torch import Tensor

from lightning_dcp.loss.linear_cross_entropy.call import LossCall, entry_point
from lightning_dcp.loss.linear_cross_entropy.matmul import HALF

NAME = "cut_cross_entropy"


@cache
def _function() -> Callable[..., Any] | str:
    """The function, or why there is none; looked up once a process."""
    return entry_point("cut-cross-entropy", "cut_cross_entropy", "linear_cross_entropy")


def refusals(call: LossCall) -> list[str]:
    """Every reason why Cut Cross-Entropy cannot serve a call; empty if it can."""
    reasons = call.common_refusals(HALF)
    if call.bias:
        reasons.append("it has no bias")
    if call.objective.label_smoothing:
        reasons.append("it has no label_smoothing")
    if call.objective.z_loss:
        reasons.append("it has no z_loss")
    found = _function()
    return [*reasons, found] if isinstance(found, str) else reasons


def cut_log_probs(hidden: Tensor, weight: Tensor, labels: Tensor, softcap: float | None) -> Tensor:
    """Log-probabilities of targets by Cut Cross-Entropy: ``[T]`` in float32, 0 where there is no target.

    Only ever run against a stand-in with the signature of cut-cross-entropy 25.1.1, for want of a GPU. Small gradients
    are not filtered out (``filter_eps=None``), so that the gradient is that of the loss; it is added up over tokens in
    the dtype of ``hidden``, which own code and Liger do in float32.

    Args:
        hidden: ``[T, H]``, float16 or bfloat16.
        weight: ``[V, H]``, of the same dtype.
        labels: int64 ``[T]``, -1 where there is no target; at least one token has one.
        softcap: the bound of logits, or None.

    Raises:
        RuntimeError: the package is not there; :func:`refusals` says so first.
    """
    function = _function()
    if isinstance(function, str):
        raise RuntimeError(function)
    losses = function(
        e=hidden.contiguous(),
        c=weight.contiguous(),
        targets=labels,
        ignore_index=-1,
        softcap=softcap,
        reduction="none",
        shift=False,
        filter_eps=None,
    )
    return -losses
