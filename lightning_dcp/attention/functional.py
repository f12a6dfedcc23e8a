"""Attention as models call it, ``[B, H, T, D]``: torch's function, and one with more kinds."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from lightning_dcp.attention.engine import AttentionKind, context_parallel_attention
from lightning_dcp.attention.options import AttentionOptions
from lightning_dcp.errors import UnsupportedAttentionError
from lightning_dcp.parallel.blocks import AttentionMask
from lightning_dcp.parallel.context import CPContext, make_context
from lightning_dcp.parallel.groups import CPGroup


@torch.compiler.disable  # a graph break in compiled models; what it does to a pack fits no graph
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    is_causal: bool | Sequence[bool] = True,
    window_size: tuple[int, int] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """Self-attention with sliding window, soft-cap and sinks, for models that need more than torch's own function.

    Outside a context-parallel region each row of the batch is one sample; inside, the pack's samples keep their borders
    and attention runs over the CP group. No mask is made in either case.

    Args:
        query: ``[B, H, T, D]``.
        key: ``[B, H_kv, T, D]``; H is a multiple of H_kv.
        value: ``[B, H_kv, T, D_v]``.
        is_causal: whether a token sees none that comes after it; one value, or one for each sample in the batch's order.
        window_size: how many tokens a token sees before and after itself, ``(left, right)`` as in flash-attn, -1 for all.
            A sliding window of n tokens with the token itself is ``(n - 1, 0)``. None: no window.
        scale: factor of the scores, 1/sqrt(D) by default.
        softcap: scores are ``softcap * tanh(scores / softcap)``; None or 0 for none.
        sinks: a learned score of each head that takes weight and gives no value, ``[H]``.
        dropout_p: must be 0: a score's dropout would depend on which rank computes it.

    Returns:
        ``[B, H, T, D_v]``.

    Raises:
        UnsupportedAttentionError: everything that does not fit together, at once.
    """
    if has_torch_function((query, key, value)):
        # A region's mode takes it from here: serve_attention below.
        options: dict[str, Any] = {"is_causal": is_causal, "window_size": window_size, "scale": scale}
        options |= {"softcap": softcap, "sinks": sinks, "dropout_p": dropout_p}
        return handle_torch_function(attention, (query, key, value), query, key, value, **options)
    kind = _kind(query, key, value, None, is_causal, window_size, scale, softcap, sinks, dropout_p)
    rows, tokens = query.shape[0], query.shape[2]
    context = _rows_as_samples(rows, tokens, query.device)
    q, k, v = (_as_autocast_would(t).transpose(1, 2).flatten(0, 1) for t in (query, key, value))
    out = context_parallel_attention(q, k, v, context, kind)
    return out.unflatten(0, (rows, tokens)).transpose(1, 2)


def serve_attention(
    context: CPContext, options: AttentionOptions, query: Tensor, key: Tensor, value: Tensor, **given: Any
) -> Tensor:
    """:func:`attention` inside a region: ``[1, H, T_local, D]`` in, ``[1, H, T_local, D_v]`` out; ``given`` is the rest."""
    return _over_group(context, options, query, key, value, _kind(query, key, value, 1, **given))


def serve_scaled_dot_product_attention(
    context: CPContext,
    options: AttentionOptions,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """torch's function inside a region: ``[1, H, T_local, D]`` in, ``[1, H, T_local, D_v]`` out."""
    problems = []
    if attn_mask is not None:
        problems.append(
            "attn_mask is given (sample borders are kept without a mask, and a rank holds only a part of the tokens; for a "
            "sliding window call lightning_dcp.attention.attention(..., window_size=...))"
        )
    problems += _dropout_problems(dropout_p) + _shape_problems(query, key, value, batch=1)
    if query.dim() == key.dim() == 4 and key.shape[1] != query.shape[1] and not enable_gqa:
        problems.append(f"{query.shape[1]} query heads on {key.shape[1]} key heads without enable_gqa=True")
    _refuse(problems, "scaled_dot_product_attention inside a context-parallel region")
    kind = AttentionKind(AttentionMask(bool(is_causal)), scale)
    return _over_group(context, options, query, key, value, kind)


def _mask(is_causal: bool | Sequence[bool] | Tensor, window_size: Sequence[int] | None, where: str) -> AttentionMask:
    """The mask, from whatever stands for truth values and whole numbers."""
    left, right = (-1, -1) if window_size is None else _window(window_size, where)
    if isinstance(is_causal, Tensor):
        is_causal = is_causal.tolist()
    if is_causal is None or isinstance(is_causal, str):
        _refuse([f"is_causal={is_causal!r} is neither True nor False nor a list of them"], where)
    each = tuple(map(bool, is_causal)) if isinstance(is_causal, Sequence) else bool(is_causal)
    return AttentionMask(each, (left, right))


def _kind(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    batch: int | None,
    is_causal: bool | Sequence[bool],
    window_size: tuple[int, int] | None,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
    dropout_p: float,
) -> AttentionKind:
    """What a call of :func:`attention` asks for, if it is one that can be served; ``batch`` is None outside a region."""
    where = "attention" if batch is None else "attention inside a context-parallel region"
    _refuse(_dropout_problems(dropout_p) + _shape_problems(query, key, value, batch=batch), where)
    return AttentionKind(_mask(is_causal, window_size, where), scale, 0.0 if softcap is None else softcap, sinks)


def _window(window_size: Sequence[int], where: str) -> tuple[int, int]:
    try:
        left, right = map(operator.index, window_size)
    except (TypeError, ValueError):
        _refuse([f"window_size={window_size!r} is not a pair (left, right) of whole numbers"], where)
        raise
    return left, right


def _over_group(
    context: CPContext, options: AttentionOptions, query: Tensor, key: Tensor, value: Tensor, kind: AttentionKind
) -> Tensor:
    q, k, v = (_as_autocast_would(t)[0].transpose(0, 1) for t in (query, key, value))
    if len(q) == len(k) == len(v) == context.num_region_tokens:
        q, k, v = (context.without_fill(t) for t in (q, k, v))
    out = context_parallel_attention(q, k, v, context, kind, scheme=options.scheme, kernel=options.kernel)
    return context.with_fill(out).transpose(0, 1).unsqueeze(0)


@lru_cache(maxsize=16)
def _rows_as_samples(rows: int, tokens: int, device: torch.device) -> CPContext:
    """A batch on one rank; kept for the layers of a model, and for batches of one shape."""
    return make_context(CPGroup(None, (0,)), 0, (tokens,) * rows, device=device)


def _dropout_problems(dropout_p: float) -> list[str]:
    reason = "a score's dropout would depend on which rank computes it; drop activations instead"
    return [f"dropout_p={dropout_p} ({reason})"] if dropout_p else []


def _shape_problems(query: Tensor, key: Tensor, value: Tensor, *, batch: int | None) -> list[str]:
    expected = "[batch, heads, tokens, head_dim]" if batch is None else "a pack: [1, heads, tokens, head_dim]"
    return [
        f"the {name} has shape {tuple(x.shape)}, expected {expected}"
        for name, x in (("query", query), ("key", key), ("value", value))
        if x.dim() != 4 or x.shape[0] != (query.shape[0] if batch is None else batch)
    ] or [
        f"the {name} has {x.shape[2]} tokens, the query {query.shape[2]} (this is self-attention)"
        for name, x in (("key", key), ("value", value))
        if x.shape[2] != query.shape[2]
    ]


def _refuse(problems: Sequence[str], where: str) -> None:
    if problems:
        remedy = "Change the call, or keep this layer out of the region." if "region" in where else "Change the call."
        raise UnsupportedAttentionError(f"{where}: {'; '.join(problems)}. {remedy}")


def _as_autocast_would(x: Tensor) -> Tensor:
    """Cast as autocast does for attention; it acts below these functions, so it cannot do so itself."""
    device = x.device.type
    if torch.is_autocast_enabled(device) and x.is_floating_point() and x.dtype != torch.float64:
        return x.to(torch.get_autocast_dtype(device))
    return x
