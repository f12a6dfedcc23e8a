"""All kernels of the linear cross-entropy, and the choice of one."""

from __future__ import annotations

from collections.abc import Callable

from lightning_dcp.errors import Problem
from lightning_dcp.loss.linear_cross_entropy import cut_cross_entropy, liger
from lightning_dcp.loss.linear_cross_entropy.call import LossCall

AUTO = "auto"
"""Asks for the first kernel that can serve the call."""
TORCH = "torch"


def _serves_all(call: LossCall) -> list[str]:
    return []


KERNELS: dict[str, Callable[[LossCall], list[str]]] = {
    liger.NAME: liger.refusals,
    cut_cross_entropy.NAME: cut_cross_entropy.refusals,
    TORCH: _serves_all,
}
"""Why each kernel cannot serve a call, fastest first; the last one serves every call."""


def loss_kernel_names() -> tuple[str, ...]:
    """Everything that can be asked for."""
    return AUTO, *KERNELS


def choose_loss_kernel(call: LossCall, asked: str = AUTO) -> str:
    """The kernel for a call: the one asked for, or the first that can serve it.

    Args:
        call: what is asked of it.
        asked: a name out of :func:`loss_kernel_names` for which :func:`kernel_problems` finds nothing.
    """
    return next(name for name, refusals in KERNELS.items() if not refusals(call)) if asked == AUTO else asked


def kernel_problems(call: LossCall, asked: str) -> list[Problem]:
    """Why the kernel asked for cannot serve a call: all reasons at once, and which kernels could.

    Args:
        call: what is asked of it.
        asked: a name out of :func:`loss_kernel_names`.
    """
    reasons = [] if asked == AUTO else KERNELS[asked](call)
    if not reasons:
        return []
    able = ", ".join(name for name, refusals in KERNELS.items() if not refusals(call))
    return [Problem(f"kernel={asked!r}", "; ".join(reasons), f"ask for one that serves this call: {AUTO}, {able}")]
