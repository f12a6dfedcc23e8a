"""Transformer Engine's own context-parallel attention, for Megatron-Core's layer specs: its group for each micro-batch.

``TEDotProductAttention`` gets its CP group when the model is built. With dynamic sizes the group belongs to the
micro-batch, so it is set around each forward and put back after it::

    packed = packed_seq_params(context)
    with te_context_parallel(model, context, scheme):
        output = model(..., packed_seq_params=packed)

The backward needs no group: autograd keeps what the forward used. Where layers are recomputed in the backward, it runs
inside the same ``with``.

What else depends on ranks in such a model is not set here. The rotary embedding of Megatron-Core 0.16 takes its place in
the sample from the attention layer's ``pg_collection.cp``.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_dcp.errors import Problem, UnsupportedAttentionError
from lightning_dcp.parallel.context import CPContext
from lightning_dcp.parallel.layout import zigzag
from lightning_dcp.parallel.ring_order import from_place_0

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams

COMM_TYPES = {"ring": "p2p", "all_gather": "all_gather", "ulysses": "a2a"}
"""Transformer Engine's names of the exchange schemes."""

_THD_SINCE = {"ring": (1, 10), "all_gather": (2, 15), "ulysses": (2, 10)}
"""The version since which a scheme takes packed samples of unequal lengths (``qkv_format="thd"``)."""

_V_HEAD_DIM_SINCE = (2, 15)
"""The version since which schemes besides the ring take values of another head size than keys."""

_DEVICE = "cuda"
_NAMED_SAMPLES = 3


def te_refusal(context: CPContext, scheme: str = "ring", modules: Sequence[nn.Module] = ()) -> str | None:
    """Why Transformer Engine cannot compute the attention of a pack, all reasons at once; None if it can.

    Args:
        context: the pack. Its samples have their padding with them: 2c must divide their lengths.
        scheme: how queries and keys come together: ``ring``, ``all_gather`` or ``ulysses``.
        modules: the ``DotProductAttention`` modules that would compute it.
    """
    if scheme not in COMM_TYPES:
        return f"Transformer Engine has no exchange scheme {scheme!r}; it has {', '.join(COMM_TYPES)}"
    reasons = [_package_problem(scheme if context.size > 1 else "ring")]
    if context.device.type != _DEVICE:
        reasons.append(f"Transformer Engine runs on {_DEVICE}, the pack lies on {context.device.type}")
    if context.size > 1:
        reasons.append(_layout_problem(context))
        reasons.append(_ring_problem(context, scheme))
        reasons += [_module_problem(module, context.size, scheme) for module in modules]
    return "; ".join(dict.fromkeys(reason for reason in reasons if reason)) or None


def te_ring_order_problem(ring_order: str | Sequence[int], scheme: str = "ring") -> Problem | None:
    """What is wrong with a ring order for Transformer Engine's attention; None if nothing is.

    Its ring is the order of the ranks in their process group: a rank's place in the group names its neighbours (in
    ``cp_global_ranks``) and also says which chunks it sees at each hop, so the list of ranks alone cannot change it.

    Args:
        ring_order: ``rank``, ``measured``, or the plane's ranks in ring order.
        scheme: how queries and keys come together; only ``ring`` has an order.
    """
    if scheme != "ring" or ring_order == "rank" or list(ring_order) == list(range(len(ring_order))):
        return None
    found = "Transformer Engine's attention, whose ring is the order of the ranks in their process group"
    return Problem(f"ring_order={ring_order!r}", found, "use ring_order='rank', or another attention kernel or scheme")


def te_arguments(context: CPContext, lengths: Sequence[int] | None = None, *, causal: bool = True) -> dict[str, Any]:
    """How a pack lies in the tensors, by the names of ``DotProductAttention.forward``.

    The boundaries are those of the whole pack, on every rank alike; Transformer Engine divides them by c itself. Queries,
    keys and values are the rank's own, ``[num_local_tokens, heads, head_dim]``.

    Args:
        context: the pack.
        lengths: tokens of each sample without the padding at its end. Without it the padding counts as tokens, which
            causal attention allows: no token before it sees it.
        causal: whether a token sees none after it.

    Raises:
        UnsupportedAttentionError: ``lengths`` that do not fit the pack.
    """
    padded = context.layout.lengths
    cu_seqlens_padded = _cumulative(padded, context.device)
    # The same tensor twice says that nothing lies between samples, which leaves more kernels to choose from.
    cu_seqlens = cu_seqlens_padded if lengths is None else _cumulative(_checked(lengths, padded), context.device)
    longest = max(padded, default=0)
    return {
        "qkv_format": "thd",
        "cu_seqlens_q": cu_seqlens,
        "cu_seqlens_kv": cu_seqlens,
        "cu_seqlens_q_padded": cu_seqlens_padded,
        "cu_seqlens_kv_padded": cu_seqlens_padded,
        "max_seqlen_q": longest,
        "max_seqlen_kv": longest,
        "attn_mask_type": "padding_causal" if causal else "padding",
    }


def packed_seq_params(context: CPContext, lengths: Sequence[int] | None = None) -> PackedSeqParams:
    """The same for Megatron-Core's layers, which know the mask from the layer's spec; see :func:`te_arguments`.

    It names no group. With one, ``TEDotProductAttention`` would set it by itself, on a stream that it makes only where
    the static CP size is above 1, and leave it set.
    """
    from megatron.core.packed_seq_params import PackedSeqParams

    arguments = te_arguments(context, lengths)
    del arguments["attn_mask_type"]
    return PackedSeqParams(**arguments)


@contextmanager
def te_context_parallel(module: nn.Module, context: CPContext, scheme: str = "ring") -> Iterator[None]:
    """While inside, a module's attention runs over the pack's CP group; after that, over the one from before.

    At size 1 it runs without a group, whatever the static size is.

    Args:
        module: a ``DotProductAttention`` (Megatron-Core's is one), or a model with some in it.
        context: the pack, with its group.
        scheme: how queries and keys come together: ``ring``, ``all_gather`` or ``ulysses``.

    Raises:
        UnsupportedAttentionError: no such module, or a pack that it cannot compute.
    """
    attentions = _attention_modules(module)
    reason = te_refusal(context, scheme, attentions)
    if reason is not None:
        raise UnsupportedAttentionError(f"Transformer Engine's context-parallel attention cannot run: {reason}")
    before = [(m, (m.cp_group, m.cp_global_ranks, m.cp_stream, m.cp_comm_type)) for m in attentions]
    own = _group_arguments(context, scheme)
    try:
        for attention in attentions:
            attention.set_context_parallel_group(*own)
        yield
    finally:
        for attention, arguments in before:
            attention.set_context_parallel_group(*arguments)


def _attention_modules(module: nn.Module) -> list[Any]:
    if importlib.util.find_spec("transformer_engine") is None:
        raise UnsupportedAttentionError("Transformer Engine (transformer_engine.pytorch) is not installed")
    kind = importlib.import_module("transformer_engine.pytorch").DotProductAttention
    found = [part for part in module.modules() if isinstance(part, kind)]
    if not found:
        raise UnsupportedAttentionError(
            f"{type(module).__name__} has no DotProductAttention of Transformer Engine in it"
        )
    return found


def _group_arguments(context: CPContext, scheme: str) -> tuple[Any, list[int] | None, torch.cuda.Stream | None, str]:
    """What ``set_context_parallel_group`` takes."""
    if context.size == 1:
        return None, None, None, COMM_TYPES[scheme]
    group = context.group
    return group.handle, list(group.global_ranks), _cp_stream(context.device), COMM_TYPES[scheme]


@cache
def _cp_stream(device: torch.device) -> torch.cuda.Stream:
    """The second stream, on which every other step of the ring runs; one a device and process."""
    return torch.cuda.Stream(device=device)


@cache
def _version() -> tuple[int, int] | None:
    """Transformer Engine's version; None where it is not installed."""
    if importlib.util.find_spec("transformer_engine") is None:
        return None
    number = re.match(r"(\d+)\.(\d+)", str(importlib.import_module("transformer_engine").__version__))
    return (int(number[1]), int(number[2])) if number else (0, 0)


def _package_problem(scheme: str) -> str | None:
    found, oldest = _version(), _THD_SINCE[scheme]
    if found is None:
        return "Transformer Engine is not installed"
    if found < oldest:
        return (
            f"Transformer Engine {found[0]}.{found[1]} does not take packed samples with the scheme {scheme}; "
            f"{oldest[0]}.{oldest[1]} and later do"
        )
    return None


def _layout_problem(context: CPContext) -> str | None:
    lengths, multiple = context.layout.lengths, 2 * context.size
    uneven = [(i, n) for i, n in enumerate(lengths) if n % multiple]
    if uneven:
        some = ", ".join(f"sample {i} of {n} to {-(-n // multiple) * multiple}" for i, n in uneven[:_NAMED_SAMPLES])
        more = f" and {len(uneven) - _NAMED_SAMPLES} more" if len(uneven) > _NAMED_SAMPLES else ""
        return f"lengths must be multiples of 2c = {multiple} tokens: pad {some}{more}"
    if context.layout.ranks != zigzag(lengths, context.size).ranks:
        return "the layout must be zigzag: of each sample's 2c equal chunks rank r holds chunk r and chunk 2c - 1 - r"
    return None


def _ring_problem(context: CPContext, scheme: str) -> str | None:
    if scheme != "ring" or from_place_0(context.ring) == tuple(range(context.size)):
        return None
    return f"its ring is the order of the ranks in their process group, not {context.ring}"


def _module_problem(module: Any, size: int, scheme: str) -> str | None:
    """What a module asks for that Transformer Engine does not compute over a group."""
    heads, kv_heads = module.num_attention_heads // module.tp_size, module.num_gqa_groups_per_partition
    if scheme == "ulysses" and (heads % size or kv_heads % size):
        return f"ulysses deals out heads: {heads} query and {kv_heads} key heads are no multiples of {size} ranks"
    if scheme == "ring" and module.window_size not in (None, (-1, 0), (-1, -1)):
        return f"a ring has no sliding window, the module's is {tuple(module.window_size)}; take all_gather or ulysses"
    if scheme != "ulysses" and getattr(module, "softmax_type", "vanilla") != "vanilla":
        return f"softmax_type={module.softmax_type!r} (a sink) needs the scheme ulysses"
    widths = module.hidden_size_per_attention_head_k, module.hidden_size_per_attention_head_v
    if scheme != "ring" and widths[0] != widths[1] and (_version() or _V_HEAD_DIM_SINCE) < _V_HEAD_DIM_SINCE:
        return f"key and value heads of sizes {widths[0]} and {widths[1]} need the scheme ring, or version 2.15"
    return None


def _checked(lengths: Sequence[int], padded: Sequence[int]) -> Sequence[int]:
    fits = len(lengths) == len(padded) and all(0 <= n <= m for n, m in zip(lengths, padded, strict=True))
    if not fits:
        raise UnsupportedAttentionError(
            f"samples of {list(lengths)} tokens without padding do not fit the pack, which holds {list(padded)}"
        )
    return lengths


def _cumulative(lengths: Sequence[int], device: torch.device) -> Tensor:
    """``[0, l_0, l_0 + l_1, ...]``, int32."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
