"""What of a Hugging Face model cannot run context-parallel: known from its configuration and its layers' classes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from lightning_dcp.errors import Problem
from lightning_dcp.models.huggingface.attention import configs, implementation_of

_MIXING = re.compile(
    r"Mamba|SSM|DeltaNet|LinearAttention|LightningAttention|ShortConv|Rwkv|Recurrent|RgLru|RGLRU|CrossAttention|[sm]LSTM"
    r"|Retention|Hyena|TimeMix|GatedDelta|KimiDelta|Bamba|Zamba\w*Mixer|IndexedAttention|Indexer$"
)
"""Classes of layers that mix tokens by other means than attention over the same tokens."""
_NOT_MIXING = re.compile(r"RMSNorm|LayerNorm|RotaryEmbedding|Cache|DecoderLayer|Model$|ForCausalLM|PreTrained|MLP")
_LAYER_TYPES = ("full_attention", "sliding_attention", "attention")
_BATCH_DEPENDENT_ROPE = ("dynamic", "longrope")
_NAME_IT = "name a region that leaves this layer out, or use a model without it"


def mixes_tokens(layer: nn.Module) -> bool:
    """Whether a layer mixes tokens by other means than self-attention."""
    kind = type(layer).__name__
    named = _MIXING.search(kind) is not None and _NOT_MIXING.search(kind) is None
    return named or bool(getattr(layer, "is_cross_attention", False))


def configuration_problems(name: str, model: PreTrainedModel) -> Iterator[Problem]:
    """What stands against the model's configuration."""
    asked = f"{type(model).__name__} as the context-parallel region {name or 'forward'!r}"
    config = model.config
    if getattr(config, "is_encoder_decoder", False):
        yield Problem(asked, "an encoder-decoder model, with cross attention", "use a decoder-only model")
    if implementation_of(model) is None and not _plain(model):
        yield Problem(
            asked,
            "a model whose attention does not go through transformers' AttentionInterface",
            "use an architecture that does (Llama, Qwen, Mistral, Gemma, gpt-oss, Mixtral, ...)",
        )
    kinds = {k for c in configs(config) for k in (getattr(c, "layer_types", None) or ())} - set(_LAYER_TYPES)
    if kinds:
        yield Problem(asked, f"layers of the types {sorted(kinds)}", _NAME_IT)
    rope = sorted({t for c in configs(config) for t in _rope_types(c)} & set(_BATCH_DEPENDENT_ROPE))
    if rope:
        yield Problem(
            asked,
            f"rotary embeddings of type {', '.join(rope)}, whose frequencies depend on the longest sample of the batch",
            "use another rope_type (default, linear, llama3, yarn)",
        )
    if getattr(config, "output_router_logits", False):
        yield Problem(
            asked,
            "output_router_logits=True: the auxiliary loss is over all tokens of the batch at once, no sum over packs",
            "set config.output_router_logits=False",
        )
    if getattr(config, "output_attentions", False):
        yield Problem(asked, "output_attentions=True, but no rank has whole attention weights", "set it to False")


def _plain(model: PreTrainedModel) -> bool:
    """Whether a model without the interface calls torch's own attention, which regions serve too."""
    return model.config._attn_implementation == "sdpa"


def _rope_types(config: Any) -> Iterator[str]:
    """The kinds of rotary embedding: one, or one for each type of layer."""
    for field in ("rope_parameters", "rope_scaling"):
        given = getattr(config, field, None)
        for part in (given, *given.values()) if isinstance(given, dict) else ():
            if isinstance(part, dict):
                yield str(part.get("rope_type", part.get("type", "default")))
