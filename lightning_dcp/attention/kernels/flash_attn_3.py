"""FlashAttention 3, for Hopper GPUs: the module flash_attn_interface."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lightning_dcp.attention.kernels.cuda_flash import device_problem
from lightning_dcp.attention.kernels.padding import common_width
from lightning_dcp.attention.kernels.varlen import VarlenArguments, VarlenKernel
from lightning_dcp.attention.shape import AttentionShape, Scores


@cache
def _package_problem() -> str | None:
    """Why the package cannot be used; looked up once a process."""
    if importlib.util.find_spec("flash_attn_interface") is None:
        return "FlashAttention 3 (flash_attn_interface) is not installed"
    try:
        _function("_flash_attn_backward")
    except (AttributeError, ImportError, OSError) as error:  # built for another torch or CUDA, or something else
        return f"FlashAttention 3 (flash_attn_interface) cannot be imported: {error}"
    return None


def _function(name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(importlib.import_module("flash_attn_interface"), name)
    return function


@cache
def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Parameters of a function, or of the one that a ``torch.library.custom_op`` wraps."""
    return dict(inspect.signature(getattr(function, "_init_fn", function)).parameters)


def _call(function: Callable[..., Any], **arguments: Any) -> Any:
    """Call with None for every other argument that has no default: 3.0.0b1 has none for the caches and rotary tables."""
    needed = {n for n, p in _parameters(function).items() if p.default is inspect.Parameter.empty}
    return function(**dict.fromkeys(needed - arguments.keys()), **arguments)


class FlashAttn3Kernel(VarlenKernel):
    """``_flash_attn_forward`` and ``_flash_attn_backward`` of FlashAttention 3.0, with cumulative lengths.

    The logsumexp is float32 ``[H, n]``. The backward takes one over more keys than its own. It writes the gradients
    into the tensors that it is given; what it returns differs between releases.
    """

    name = "flash_attn_3"
    has_softcap = True

    def missing(self) -> str | None:  # noqa: D102
        problem = device_problem(9)
        if problem is None and torch.cuda.get_device_capability()[0] != 9:
            problem = "it runs on Hopper GPUs (compute capability 9.x) only"
        return problem or _package_problem()

    def refusal(self, shape: AttentionShape, scores: Scores) -> str | None:  # noqa: D102
        problem = super().refusal(shape, scores)
        if problem is None and torch.are_deterministic_algorithms_enabled() and common_width(shape) > 192:
            return "its backward is not deterministic for heads wider than 192"
        return problem

    def run(self, q: Tensor, k: Tensor, v: Tensor, arguments: VarlenArguments) -> tuple[Tensor, Tensor]:  # noqa: D102
        forward = _function("_flash_attn_forward")
        out, lse, *_ = _call(forward, q=q, k=k, v=v, causal=arguments.causal, **_common(arguments))
        return out, lse

    def run_backward(  # noqa: D102
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, arguments: VarlenArguments
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        backward = _function("_flash_attn_backward")
        causal = "is_causal" if "is_causal" in _parameters(backward) else "causal"
        _call(
            backward,
            dout=grad,
            q=q,
            k=k,
            v=v,
            out=out,
            softmax_lse=lse,
            dq=dq,
            dk=dk,
            dv=dv,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            **{causal: arguments.causal},
            **_common(arguments),
        )
        return dq, dk, dv


def _common(arguments: VarlenArguments) -> dict[str, Any]:
    """What forward and backward take alike; the window is none by default, in releases that spell it differently."""
    return {
        "cu_seqlens_q": arguments.cu_seqlens_q,
        "cu_seqlens_k": arguments.cu_seqlens_k,
        "max_seqlen_q": arguments.max_seqlen_q,
        "max_seqlen_k": arguments.max_seqlen_k,
        "softmax_scale": arguments.scale,
        "softcap": arguments.softcap,
    }
