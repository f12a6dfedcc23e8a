"""All kernels, and the choice of one."""

from __future__ import annotations

from lightning_dcp.attention.kernels.base import Kernel
from lightning_dcp.attention.kernels.cpu_flash import CPUFlashKernel
from lightning_dcp.attention.kernels.cuda_flash import CUDAFlashKernel
from lightning_dcp.attention.kernels.flash_attn import FlashAttnKernel
from lightning_dcp.attention.kernels.flash_attn_3 import FlashAttn3Kernel
from lightning_dcp.attention.kernels.reference import ReferenceKernel
from lightning_dcp.attention.kernels.varlen_attn import VarlenAttnKernel
from lightning_dcp.attention.shape import AttentionShape, Scores
from lightning_dcp.errors import UnsupportedAttentionError

KERNELS: dict[str, Kernel] = {
    kernel.name: kernel
    for kernel in (
        FlashAttn3Kernel(),
        FlashAttnKernel(),
        CUDAFlashKernel(),
        VarlenAttnKernel(),
        CPUFlashKernel(),
        ReferenceKernel(),
    )
}
"""All kernels by name, fastest first; the last one serves every call."""

AUTO = "auto"
"""Asks for the fastest kernel that can compute the call."""


def kernel_names() -> tuple[str, ...]:
    """Everything that can be asked for."""
    return AUTO, *KERNELS


def choose_kernel(shape: AttentionShape, scores: Scores, asked: str = AUTO) -> Kernel:
    """The kernel for a call: the one asked for, or the fastest that can compute it.

    Args:
        shape: heads, dtype and device of the call.
        scores: scale and soft-cap of the call.
        asked: a name out of :func:`kernel_names`.

    Raises:
        UnsupportedAttentionError: a device without data, an unknown name, or a kernel that cannot compute the call.
    """
    if shape.device == "meta":
        raise UnsupportedAttentionError(
            f"no attention kernel for device meta; asked for {asked!r}, but tensors there have no data to compute with. "
            "Materialize the model (module.to_empty(device=...)) before its first forward"
        )
    if asked == AUTO:
        return next(kernel for kernel in KERNELS.values() if kernel.refusal(shape, scores) is None)
    if asked not in KERNELS:
        raise UnsupportedAttentionError(
            f"unknown attention kernel {asked!r}; there are {', '.join(kernel_names())}. {_could_serve(shape, scores)}"
        )
    reason = KERNELS[asked].refusal(shape, scores)
    if reason is not None:
        raise UnsupportedAttentionError(
            f"attention kernel {asked!r} cannot compute this call: {reason}. {_could_serve(shape, scores)}"
        )
    return KERNELS[asked]


def _could_serve(shape: AttentionShape, scores: Scores) -> str:
    able = [name for name, kernel in KERNELS.items() if kernel.refusal(shape, scores) is None]
    call = (
        f"{shape.heads} query and {shape.kv_heads} key heads of size {shape.head_dim} (values {shape.v_head_dim}), "
        f"{shape.dtype} on {shape.device}" + (f", soft-cap {scores.softcap:g}" if scores.softcap else "")
    )
    return f"For {call} there are: {', '.join(able)}"
