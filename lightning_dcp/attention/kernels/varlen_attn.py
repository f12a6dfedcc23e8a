"""torch's variable-length attention, ``torch.nn.attention.varlen``."""

from __future__ import annotations

import importlib
from functools import cache

import torch
from torch import Tensor

from lightning_dcp.attention.kernels.cuda_flash import CUDAFlashKernel
from lightning_dcp.attention.kernels.varlen import VarlenArguments


@cache
def _operator_problem() -> str | None:
    """Why torch's operators cannot be used; importing their module is what registers them."""
    try:
        importlib.import_module("torch.nn.attention.varlen")
    except ImportError:
        return f"torch {torch.__version__} has no torch.nn.attention.varlen; 2.10 and later have"
    names = {argument.name for argument in torch.ops.torch_attn._varlen_attn.default._schema.arguments}
    return None if "scale" in names else f"its operator takes no scale in torch {torch.__version__}"


class VarlenAttnKernel(CUDAFlashKernel):
    """The operators under ``varlen_attn``, which hand out the logsumexp ``[H, n]`` and take one in the backward.

    torch 2.10 to 2.13 compute them by the operators of :class:`CUDAFlashKernel`, which has less around it. They are
    here for whatever torch computes them by elsewhere. What its versions added since (window, caches, splits, backend)
    comes after the scale and has a default.
    """

    name = "varlen_attn"

    def missing(self) -> str | None:  # noqa: D102
        return _operator_problem() or super().missing()

    def run(self, q: Tensor, k: Tensor, v: Tensor, arguments: VarlenArguments) -> tuple[Tensor, Tensor]:  # noqa: D102
        importlib.import_module("torch.nn.attention.varlen")
        out, lse, _ = torch.ops.torch_attn._varlen_attn(
            q,
            k,
            v,
            arguments.cu_seqlens_q,
            arguments.cu_seqlens_k,
            arguments.max_seqlen_q,
            arguments.max_seqlen_k,
            arguments.causal,
            scale=arguments.scale,
        )
        return out, lse

    def run_backward(  # noqa: D102
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, arguments: VarlenArguments
    ) -> tuple[Tensor, Tensor, Tensor]:
        importlib.import_module("torch.nn.attention.varlen")
        dq, dk, dv = torch.ops.torch_attn._varlen_attn_backward(
            grad,
            q,
            k,
            v,
            out,
            lse,
            arguments.cu_seqlens_q,
            arguments.cu_seqlens_k,
            arguments.max_seqlen_q,
            arguments.max_seqlen_k,
            arguments.causal,
            torch.zeros(2, dtype=torch.uint64, device=q.device),  # the dropout's random state; there is none
            scale=arguments.scale,
        )
        return dq, dk, dv
