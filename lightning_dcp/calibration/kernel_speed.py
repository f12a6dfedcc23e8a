"""How much of its speed the attention kernel keeps on short sequences."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import mean

import torch
from torch import Tensor

from lightning_dcp.attention.engine import AttentionKind, context_parallel_attention
from lightning_dcp.calibration.record import AttentionCalls, RecordedCall
from lightning_dcp.parallel.blocks import AttentionMask
from lightning_dcp.parallel.context import CPContext, make_context
from lightning_dcp.parallel.groups import CPGroup

_MOST_SAMPLES = 64
_REPEATS = 5

Table = tuple[tuple[int, float], ...]


def table_lengths(max_seqlen_per_dp_cp_rank: int) -> tuple[int, ...]:
    """The lengths of the table: powers of two from 1 up to a rank's limit, and that limit."""
    powers = {2**power for power in range(max_seqlen_per_dp_cp_rank.bit_length())}
    return tuple(sorted(powers | {max_seqlen_per_dp_cp_rank}))


def attention_efficiency(calls: AttentionCalls, max_seqlen_per_dp_cp_rank: int, device: torch.device) -> Table:
    """Measure the kernel alone on samples of each length, all keys on one rank, forward and backward.

    The fastest of several runs counts: what disturbs a run only ever makes it slower. Best on one rank while the others
    wait: where ranks share cores, short runs find a core of their own, and long ones do not.

    Args:
        calls: the model's attention calls, as recorded; without any the table says full speed everywhere.
        max_seqlen_per_dp_cp_rank: tokens that are computed at a time (fewer for lengths below a 64th of it).
        device: of this rank.

    Returns:
        Pairs (tokens, share of the best speed a token^2), as :class:`~lightning_dcp.schedule.CostModel` has them.
    """
    if not calls.forward:
        return ((1, 1.0),)
    lengths = table_lengths(max_seqlen_per_dp_cp_rank)
    rounds = [[_sample_seconds(calls, n, max_seqlen_per_dp_cp_rank, device) for n in lengths] for _ in range(_REPEATS)]
    return as_efficiency(lengths, [min(times) for times in zip(*rounds, strict=True)])


def as_efficiency(lengths: Sequence[int], seconds: Sequence[float]) -> Table:
    """Speed a token^2 at each length, relative to the best: the nearest table that never falls.

    Args:
        lengths: ascending.
        seconds: of one sample of each length.
    """
    pools: list[list[float]] = []  # neighbours whose speeds fall share their mean (pool adjacent violators)
    for length, taken in zip(lengths, seconds, strict=True):
        pools.append([length**2 / taken])
        while len(pools) > 1 and mean(pools[-2]) > mean(pools[-1]):
            pools[-2:] = [pools[-2] + pools[-1]]
    speeds = [mean(pool) for pool in pools for _ in pool]
    return tuple((length, speed / speeds[-1]) for length, speed in zip(lengths, speeds, strict=True))


def _sample_seconds(calls: AttentionCalls, length: int, tokens: int, device: torch.device) -> float:
    """Seconds of all the model's calls on one sample of this length."""
    samples = max(1, min(_MOST_SAMPLES, tokens // length))
    context = make_context(CPGroup(None, (0,)), 0, (length,) * samples, device=device)
    total = 0.0
    for call in calls.forward.keys() | calls.backward.keys():
        forward, backward = _call_seconds(call, context)
        total += calls.forward[call] * forward + calls.backward[call] * backward
    return total / samples


def _call_seconds(call: RecordedCall, context: CPContext) -> tuple[float, float]:
    """Seconds of one forward and one backward call on a pack."""
    size, device, shape = context.num_local_tokens, context.device, call.shape
    widths = ((shape.heads, shape.head_dim), (shape.kv_heads, shape.head_dim), (shape.kv_heads, shape.v_head_dim))
    q, k, v = (torch.randn(size, *width, dtype=shape.dtype, device=device).requires_grad_() for width in widths)
    kind = AttentionKind(AttentionMask(call.causal, call.window_size), softcap=call.softcap)

    def attend() -> Tensor:
        return context_parallel_attention(q, k, v, context, kind, kernel=call.kernel)

    attend()  # index tensors and a cold kernel are no part of the speed
    start = _now(device)
    out = attend()
    middle = _now(device)
    out.backward(torch.ones_like(out))
    return middle - start, _now(device) - middle


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
