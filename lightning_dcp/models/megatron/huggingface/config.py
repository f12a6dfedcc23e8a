"""What a Hugging Face ``config.json`` says, in the words of Megatron-Core; what has no words there is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_dcp.errors import ConfigurationError, Problem, raise_problems
from lightning_dcp.models.megatron.huggingface.families import FAMILIES, Family
from lightning_dcp.models.megatron.huggingface.rope import SCALING

_USE_OTHER = "use another model, or train this one with transformers under DCPStrategy, which runs it as it is"


@dataclass(frozen=True)
class HuggingFaceConfig:
    """A config, translated.

    Attributes:
        family: the architecture.
        fields: fields of the TransformerConfig that say what is computed.
        training: fields that matter for training only; a run may well set others.
        options: arguments of ``GPTModel``.
        rope_scaling: Llama 3's change of the rotary frequencies (:func:`.rope.scale_rotary`), if any.
        output_bias: whether the attention's output projection has a bias, though other linear layers have none.
        raw: the config as it was.
    """

    family: Family
    fields: dict[str, Any]
    training: dict[str, Any]
    options: dict[str, Any]
    rope_scaling: dict[str, float] | None
    output_bias: bool
    raw: dict[str, Any]


def read_config(path: str | Path) -> HuggingFaceConfig:
    """Read a folder's ``config.json``.

    Raises:
        ConfigurationError: no such file, or all that Megatron-Core's model would compute otherwise.
    """
    file = Path(path) / "config.json"
    if not file.is_file():
        raise ConfigurationError(
            [
                Problem(
                    f"the Hugging Face model {str(path)!r}",
                    "no folder with a config.json",
                    "give a local folder; huggingface_hub.snapshot_download(name) makes one of a model on the Hub",
                )
            ]
        )
    return parse_config(json.loads(file.read_text()))


def parse_config(raw: Mapping[str, Any]) -> HuggingFaceConfig:
    """Translate the content of a ``config.json``.

    Raises:
        ConfigurationError: all that Megatron-Core's model would compute otherwise.
    """
    names = raw.get("architectures") or []
    family = FAMILIES.get(names[0]) if len(names) == 1 else None
    if family is None:
        problem = Problem(f"architectures: {names}", f"the known ones are {', '.join(FAMILIES)}", _USE_OTHER)
        raise ConfigurationError([problem])
    raise_problems(list(_problems(raw, family)))
    attention = family.qkv_bias if family.qkv_bias is not None else bool(raw.get("attention_bias", False))
    mlp = family.mlp_bias and bool(raw.get("mlp_bias", False))
    with_output = family.qkv_bias is None and attention
    fields = _fields(raw, family) | {"add_bias_linear": mlp, "add_qkv_bias": attention and not mlp}
    rope = rope_of(raw)
    theta = float(rope.get("rope_theta", raw.get("rope_theta", family.theta)))
    options = {
        "vocab_size": raw["vocab_size"],
        "max_sequence_length": raw.get("max_position_embeddings", 1 << 20),
        "position_embedding_type": "rope",
        "rotary_base": int(theta) if theta.is_integer() else theta,
        "rotary_percent": 1.0,
        "share_embeddings_and_output_weights": bool(raw.get("tie_word_embeddings", False)),
    }
    scaling = {name: rope[name] for name in SCALING} if rope.get("rope_type") == "llama3" else None
    training = {
        "init_method_std": raw.get("initializer_range", 0.02),
        "attention_dropout": raw.get("attention_dropout", 0.0),
    }
    return HuggingFaceConfig(family, fields, training, options, scaling, with_output and not mlp, dict(raw))


def rope_of(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of rotary positions: ``rope_parameters``, or ``rope_scaling`` of configs before transformers 5."""
    rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    rope.setdefault("rope_type", rope.pop("type", "default"))
    return rope


def _fields(raw: Mapping[str, Any], family: Family) -> dict[str, Any]:
    heads = raw["num_attention_heads"]
    fields = {
        "num_layers": raw["num_hidden_layers"],
        "hidden_size": raw["hidden_size"],
        "ffn_hidden_size": raw["intermediate_size"],
        "num_attention_heads": heads,
        "num_query_groups": raw.get("num_key_value_heads") or heads,
        "kv_channels": raw.get("head_dim") or raw["hidden_size"] // heads,
        "normalization": "RMSNorm",
        "layernorm_epsilon": raw.get("rms_norm_eps", family.epsilon),
        "gated_linear_unit": True,
        "activation_func": "silu",
        "qk_layernorm": family.qk_norm,
        **_windows(raw, family),
    }
    return fields | (_expert_fields(raw, family) if family.experts else {})


def _windows(raw: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Megatron-Core's window is the tokens before a token and behind it; Hugging Face counts the token itself, too."""
    size = raw.get("sliding_window")
    if not size or family.window == "none" or (family.window != "all" and not raw.get("use_sliding_window", False)):
        return {}
    window = {"window_size": (size - 1, 0)}
    layers = raw["num_hidden_layers"]
    if family.window != "layers":
        return window
    kinds = raw.get("layer_types")
    first = raw.get("max_window_layers", 28)
    slides = [k == "sliding_attention" for k in kinds] if kinds else [i >= first for i in range(layers)]
    if not any(slides):
        return {}
    return window if all(slides) else window | {"window_attn_skip_freq": [int(s) for s in slides]}


def _expert_fields(raw: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """The auxiliary loss is left out: transformers has it over all layers at once, and only with router logits."""
    layers = raw["num_hidden_layers"]
    step, dense = raw.get("decoder_sparse_step") or 1, raw.get("mlp_only_layers") or []
    sparse = [int(i not in dense and (i + 1) % step == 0) for i in range(layers)]
    fields = {
        "num_moe_experts": expert_count(raw),
        "moe_router_topk": raw.get("num_experts_per_tok", 2),
        "moe_ffn_hidden_size": raw.get("moe_intermediate_size") or raw["intermediate_size"],
        "moe_router_pre_softmax": family.model_type != "mixtral" and not raw.get("norm_topk_prob", False),
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
    }
    return fields if all(sparse) else fields | {"moe_layer_freq": sparse}


def expert_count(raw: Mapping[str, Any]) -> int:
    """Experts of a layer; ``num_local_experts``, or ``num_experts`` in older configs of Qwen."""
    return int(raw.get("num_local_experts") or raw.get("num_experts") or 0)


def _problems(raw: Mapping[str, Any], family: Family) -> Iterator[Problem]:
    yield from _missing(raw, family)
    act = raw.get("hidden_act", "silu")
    if act not in ("silu", "swish"):
        yield Problem(f"hidden_act={act!r}", "gated MLPs with silu only", _USE_OTHER)
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unnamed")
        yield Problem(
            f"quantized weights ({method})", "plain floating-point weights only", "use the model's original weights"
        )
    yield from _rope_problems(raw)
    if family.mlp_bias and raw.get("mlp_bias") and not raw.get("attention_bias"):
        yield Problem("mlp_bias=True, attention_bias=False", "biases of MLPs come with those of attention", _USE_OTHER)
    if raw.get("router_jitter_noise"):
        found = "noise on the experts' inputs, which Megatron-Core puts on the router's alone"
        yield Problem(f"router_jitter_noise={raw['router_jitter_noise']}", found, "set it to 0 in config.json")
    kinds = set(raw.get("layer_types") or []) - {"full_attention", "sliding_attention"}
    if kinds:
        yield Problem(f"layer_types with {', '.join(sorted(kinds))}", "full and sliding attention only", _USE_OTHER)


def _missing(raw: Mapping[str, Any], family: Family) -> Iterator[Problem]:
    needed = ["vocab_size", "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads"]
    absent: Sequence[str] = [name for name in needed if not isinstance(raw.get(name), int)]
    if family.experts and not expert_count(raw):
        absent = [*absent, "num_local_experts"]
    if absent:
        problem = Problem(
            f"a {family.architecture}", f"a config.json without {', '.join(absent)}", "complete config.json"
        )
        raise ConfigurationError([problem])
    yield from ()


def _rope_problems(raw: Mapping[str, Any]) -> Iterator[Problem]:
    rope = rope_of(raw)
    kind = rope["rope_type"]
    if not isinstance(kind, str) or any(isinstance(value, Mapping) for value in rope.values()):
        yield Problem("rope_parameters that differ between layers", "one kind of positions for all layers", _USE_OTHER)
    elif kind not in ("default", "llama3"):
        yield Problem(f"rope_type={kind!r}", "the rope types default and llama3 only", _USE_OTHER)
    elif kind == "llama3" and (absent := [name for name in SCALING if name not in rope]):
        yield Problem("rope_type='llama3'", f"no {', '.join(absent)}", "complete rope_scaling in config.json")
    partial = rope.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        yield Problem(f"partial_rotary_factor={partial}", "heads that are rotated whole", _USE_OTHER)
