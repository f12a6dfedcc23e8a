"""The package flash-attn, for NVIDIA GPUs since Ampere."""

from __future__ import annotations

import importlib
import importlib.util
import re
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from lightning_dcp.attention.kernels.cuda_flash import device_problem
from lightning_dcp.attention.kernels.varlen import VarlenArguments, VarlenKernel

_OLDEST = (2, 7)
"""Since this version the functions return out, logsumexp ``[H, n]`` and two more, and take the window as two numbers."""


@cache
def _package_problem() -> str | None:
    """Why the package cannot be used; looked up once a process."""
    if importlib.util.find_spec("flash_attn") is None:
        return "the package flash-attn is not installed"
    try:
        version = str(importlib.import_module("flash_attn").__version__)
        _interface()
    except (ImportError, OSError) as error:  # built for another torch or CUDA
        return f"the package flash-attn cannot be imported: {error}"
    number = re.match(r"(\d+)\.(\d+)", version)
    if number is None or (int(number[1]), int(number[2])) < _OLDEST:
        return f"flash-attn {version} is too old; it must be 2.7 or later"
    return None


def _interface() -> ModuleType:
    return importlib.import_module("flash_attn.flash_attn_interface")


def _in_both(arguments: VarlenArguments) -> dict[str, Any]:
    """What forward and backward take alike."""
    return {
        "cu_seqlens_q": arguments.cu_seqlens_q,
        "cu_seqlens_k": arguments.cu_seqlens_k,
        "max_seqlen_q": arguments.max_seqlen_q,
        "max_seqlen_k": arguments.max_seqlen_k,
        "dropout_p": 0.0,
        "softmax_scale": arguments.scale,
        "causal": arguments.causal,
        "window_size_left": -1,
        "window_size_right": -1,
        "softcap": arguments.softcap,
        "alibi_slopes": None,
    }


class FlashAttnKernel(VarlenKernel):
    """``_flash_attn_varlen_forward`` and ``_flash_attn_varlen_backward`` of flash-attn 2.7 and 2.8.

    Every argument by its name: later releases add some, with defaults. With ``torch.use_deterministic_algorithms`` the
    backward adds up in a fixed order, at the price of speed and memory.
    """

    name = "flash_attn"
    has_softcap = True

    def missing(self) -> str | None:  # noqa: D102
        return device_problem() or _package_problem()

    def run(self, q: Tensor, k: Tensor, v: Tensor, arguments: VarlenArguments) -> tuple[Tensor, Tensor]:  # noqa: D102
        out, lse, *_ = _interface()._flash_attn_varlen_forward(
            q=q,
            k=k,
            v=v,
            **_in_both(arguments),
            return_softmax=False,
        )
        return out, lse

    def run_backward(  # noqa: D102
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, arguments: VarlenArguments
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        _interface()._flash_attn_varlen_backward(
            dout=grad,
            q=q,
            k=k,
            v=v,
            out=out,
            softmax_lse=lse,
            dq=dq,
            dk=dk,
            dv=dv,
            **_in_both(arguments),
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        return dq, dk, dv
