"""Tiny Hugging Face models of many families, with weights that put attention far from uniform."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import transformers
from packaging.version import Version
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.models.oracle import DENSE
from tests.support.training import VOCAB

WINDOW = 5
ABSENT = object()
"""A size that a family does not have."""
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": False}
_ALTERNATING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
_GPT2 = {
    "vocab_size": VOCAB,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 128,
}
_NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {}),
    "mistral": ("mistral", {"sliding_window": WINDOW}),
    "gemma2": (
        "gemma2",
        _ALTERNATING | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 8},
    ),
    "gemma3": ("gemma3_text", _ALTERNATING | {"query_pre_attn_scalar": 8}),
    "gpt-oss": ("gpt_oss", _ALTERNATING | _EXPERTS | {"rope_scaling": None}),
    "mixtral": ("mixtral", _EXPERTS),
    "qwen3-moe": (
        "qwen3_moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "norm_topk_prob": True},
    ),
    "gpt2": ("gpt2", _GPT2 | _NO_DROPOUT),
}
"""Model type and configuration: every family that is promised."""

MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "olmo2": ("olmo2", {}),
    "phi3": ("phi3", {}),
    "granite": ("granite", {"attention_multiplier": 0.3, "logits_scaling": 2.0, "residual_multiplier": 0.7}),
    "cohere": ("cohere", {"logit_scale": 0.5}),
    "starcoder2": (
        "starcoder2",
        {"sliding_window": WINDOW, "residual_dropout": 0.0, "embedding_dropout": 0.0, "attention_dropout": 0.0},
    ),
    "deepseek-v3": (
        "deepseek_v3",
        {
            **{
                "num_key_value_heads": 4,
                "q_lora_rank": 8,
                "kv_lora_rank": 8,
                "qk_nope_head_dim": 8,
                "qk_rope_head_dim": 4,
            },
            **{"v_head_dim": 6, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1},
            **{"head_dim": 4, "moe_intermediate_size": 12, "first_k_dense_replace": 1, "n_shared_experts": 1},
        },
    ),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0]}),
    "glm4": ("glm4", {}),
    "falcon": (
        "falcon",
        {
            "head_dim": ABSENT,
            "ffn_hidden_size": 24,
            "alibi": False,
            "new_decoder_architecture": True,
            "num_kv_heads": 2,
        },
    ),
    "gpt-neox": ("gpt_neox", {"rotary_pct": 0.5, "attention_dropout": 0.0, "hidden_dropout": 0.0}),
    "opt": ("opt", {"ffn_dim": 24, "word_embed_proj_dim": 16, "dropout": 0.0, "attention_dropout": 0.0}),
}
"""Families that no one asked for, to find out whether refusals raise false alarms."""

WITHOUT_INTERFACE = ("falcon",)
"""Families that call torch's attention themselves, whatever implementation is asked for."""


def config_of(family: str, **changes: Any) -> Any:
    """The configuration of a tiny model of a family."""
    kind, own = (FAMILIES | MORE)[family]
    sizes = {} if kind == "gpt2" else SIZES
    given = dict(sizes) | own | changes
    return AutoConfig.for_model(kind, **{name: value for name, value in given.items() if value is not ABSENT})


def build(family: str, *, attention: str = DENSE, seed: int = 1, **changes: Any) -> PreTrainedModel:
    """A tiny model; by default with the tests' dense attention, in the default dtype."""
    torch.manual_seed(seed)
    config = config_of(family, **changes)
    if hasattr(config, "_experts_implementation"):  # transformers 5: the default, a grouped product, has no float64
        config._experts_implementation = "eager"
    if family in WITHOUT_INTERFACE and attention == DENSE:
        attention = "sdpa"
    return enlarge(AutoModelForCausalLM.from_config(config, attn_implementation=attention))


def enlarge(model: PreTrainedModel, seed: int = 2) -> PreTrainedModel:
    """Larger weights than a fresh model's: matrices, biases, sinks; norms stay near 1."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            if parameter.dim() > 1:
                parameter.normal_(std=0.4, generator=generator)
            elif "norm" in name.lower() or "ln_" in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter) * 0.2)
            else:  # biases and sinks start at 0, or at nothing at all
                parameter.normal_(std=0.5, generator=generator)
    return model


def lacking(families: Mapping[str, Any]) -> list[str]:
    """Families that the installed transformers does not have."""
    return [name for name, (kind, _) in families.items() if kind not in transformers.CONFIG_MAPPING]


TRANSFORMERS_5 = Version(transformers.__version__) >= Version("5")
