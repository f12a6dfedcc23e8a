"""torch's own flash attention for CUDA."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_dcp.attention.kernels.padding import common_width
from lightning_dcp.attention.kernels.varlen import VarlenArguments, VarlenKernel
from lightning_dcp.attention.shape import AttentionShape, Scores


def device_problem(capability: int = 8) -> str | None:
    """What the CUDA device lacks for flash attention; None if nothing.

    Args:
        capability: the lowest compute capability, as its major version.
    """
    if torch.version.hip is not None:
        return "its logsumexp has another layout on ROCm"
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    found = torch.cuda.get_device_capability()
    if found < (capability, 0):
        return f"it needs compute capability {capability}.0, the device has {found[0]}.{found[1]}"
    return None


def _is_small(capability: tuple[int, int]) -> bool:
    """Whether a multiprocessor has about 100 KiB of shared memory: Ampere and Ada but for data centers, and sm_12x."""
    return (8, 6) <= capability <= (8, 9) or capability[0] == 12


class CUDAFlashKernel(VarlenKernel):
    """``aten::_flash_attention_forward`` and its backward, with one schema from torch 2.7 to 2.13.

    Over cumulative lengths the logsumexp is float32 ``[H, n]``. The backward takes it as given, so that one over more
    keys than the call's gives this call's part of the gradients. Whether it is deterministic is up to
    ``torch.use_deterministic_algorithms``, which the operator itself reads.
    """

    name = "cuda_flash"

    def missing(self) -> str | None:  # noqa: D102
        if not torch.backends.cuda.is_flash_attention_available():
            return "this torch is built without flash attention"
        return device_problem()

    def refusal(self, shape: AttentionShape, scores: Scores) -> str | None:  # noqa: D102
        problem = super().refusal(shape, scores)
        width = common_width(shape, self.head_multiple)
        if problem is None and 192 < width <= 224 and _is_small(torch.cuda.get_device_capability()):
            return "its backward has no heads of size 193 to 224 on this device"
        return problem

    def run(self, q: Tensor, k: Tensor, v: Tensor, arguments: VarlenArguments) -> tuple[Tensor, Tensor]:  # noqa: D102
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q,
            k,
            v,
            arguments.cu_seqlens_q,
            arguments.cu_seqlens_k,
            arguments.max_seqlen_q,
            arguments.max_seqlen_k,
            0.0,  # dropout
            arguments.causal,
            False,  # the attention weights for debugging
            scale=arguments.scale,
        )
        return out, lse

    def run_backward(  # noqa: D102
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, arguments: VarlenArguments
    ) -> tuple[Tensor, Tensor, Tensor]:
        # Seed and offset of the dropout, in the forward's shapes: the schema wants them, and without dropout nothing
        # reads them.
        rng_state = torch.zeros(2, dtype=torch.uint64, device=q.device)
        unused = torch.zeros((), dtype=torch.uint64, device=q.device)
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
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
            0.0,  # dropout
            arguments.causal,
            rng_state,
            unused,
            scale=arguments.scale,
        )
        return dq, dk, dv
