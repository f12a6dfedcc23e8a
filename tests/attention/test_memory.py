"""Memory of attention: nothing as large as T x T, and a rank's share falls with the size of the group."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch

from lightning_dcp.attention.kernels import KERNELS
from lightning_dcp.attention.engine import AttentionCall, AttentionMask
from lightning_dcp.attention.schemes import SCHEMES
from lightning_dcp.attention.shape import AttentionShape, Scores
from lightning_dcp.parallel.context import CPContext
from tests.attention.support import Case, attend, attend_played
from tests.attention.dense import KINDS, Inputs
from tests.attention.tracking import TensorWatch
from tests.parallel.support import join_world, own_context
from tests.support.ranks import RankPool


def peak_bytes(scheme, size, tokens, heads, kv_heads, dtype, head_dim=32, on=(1,)):
    context = own_context(join_world(), (tokens,), size)
    return _peak(context, scheme, heads, kv_heads, dtype, head_dim)

def _peak(context: CPContext, scheme, heads, kv_heads, dtype, head_dim) -> int:
    n = context.num_local_tokens
    watch = TensorWatch()
    with watch, torch.no_grad():
        q, grad = (torch.randn(n, heads, head_dim, dtype=dtype) for _ in range(2))
        k, v = (torch.randn(n, kv_heads, head_dim, dtype=dtype) for _ in range(2))
        call = AttentionCall(context, AttentionShape.of(q, k, v), AttentionMask(), Scores(head_dim**-0.5), KERNELS["cpu_flash"])
        out, saved = SCHEMES[scheme].forward(call, q, k, v, None)
        fwd=watch.peak
        grads = SCHEMES[scheme].backward(call, grad, saved, None)
    return watch.peak,fwd

if __name__=="__main__":
    pool=RankPool(4)
    for heads,kv in ((4,4),(4,1)):
        for dtype in (torch.float32,torch.bfloat16):
            one=pool.run(peak_bytes,1,"ring",1,4096,heads,kv,dtype)[0]
            for s in SCHEMES:
                four=pool.run(peak_bytes,4,s,4,4096,heads,kv,dtype)
                print(heads,kv,dtype,s,"bwd",max(f[0] for f in four)/one[0],"fwd",max(f[1] for f in four)/one[1], one, four)
    pool.close()
