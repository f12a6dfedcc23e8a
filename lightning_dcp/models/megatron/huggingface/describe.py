"""A ``config.json`` for a Megatron-Core model, and whether one says what a model computes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

from torch import nn

from lightning_dcp.errors import Problem
from lightning_dcp.models.megatron.core_attention import windowed_layers
from lightning_dcp.models.megatron.huggingface.config import HuggingFaceConfig
from lightning_dcp.models.megatron.huggingface.families import FAMILIES, Family
from lightning_dcp.models.megatron.model import MegatronModel

_PLAIN: dict[str, Any] = {
    "window_size": None,
    "window_attn_skip_freq": None,
    "softmax_type": "vanilla",
    "softmax_scale": None,
    "rotary_interleaved": False,
    "no_rope_freq": None,
    "attention_output_gate": False,
    "multi_latent_attention": False,
    "layernorm_zero_centered_gamma": False,
    "apply_residual_connection_post_layernorm": False,
    "glu_linear_offset": 0.0,
    "activation_func_clamp_value": None,
    "use_mup": False,
    "mtp_num_layers": None,
    "num_moe_experts": None,
}
"""Fields that change what is computed, as the models of all families have them."""
_PLAIN_EXPERTS: dict[str, Any] = {
    "moe_layer_freq": 1,
    "moe_router_score_function": "softmax",
    "moe_router_topk_scaling_factor": None,
    "moe_router_num_groups": None,
    "moe_router_enable_expert_bias": False,
    "moe_shared_expert_intermediate_size": None,
    "moe_apply_probs_on_input": False,
    "moe_latent_size": None,
    "moe_input_jitter_eps": None,
}


def describe(
    model: MegatronModel, *, rope_scaling: Mapping[str, float] | None = None, family: Family | None = None
) -> dict[str, Any]:
    """The content of ``config.json`` for a model.

    Args:
        model: the model.
        rope_scaling: Llama 3's change of the rotary frequencies, which the model itself does not tell.
        family: the architecture; by default one that fits.
    """
    config, chunk = model.config, model.chunk
    family = family or _family(model)
    theta = float(chunk.rotary_base)
    rope: dict[str, Any] = {"rope_type": "llama3", **rope_scaling} if rope_scaling else {"rope_type": "default"}
    described = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "torch_dtype": str(config.params_dtype).removeprefix("torch."),
        "vocab_size": chunk.vocab_size,
        "max_position_embeddings": chunk.max_sequence_length,
        "tie_word_embeddings": chunk.share_embeddings_and_output_weights,
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_query_groups,
        "head_dim": config.kv_channels,
        "hidden_act": "silu",
        "rms_norm_eps": config.layernorm_epsilon,
        "initializer_range": config.init_method_std,
        "rope_theta": theta,
        "rope_scaling": rope if rope_scaling else None,  # what transformers 4 reads, and what 5 does
        "rope_parameters": rope | {"rope_theta": theta},
    }
    if family.qkv_bias is None:
        described["attention_bias"] = config.add_bias_linear or config.add_qkv_bias
    if family.mlp_bias:
        described["mlp_bias"] = config.add_bias_linear
    return described | _windows(config, family) | (_experts(config, family) if family.experts else {})


def _family(model: MegatronModel) -> Family:
    config = model.config
    if config.num_moe_experts:
        return FAMILIES["Qwen3MoeForCausalLM" if config.qk_layernorm else "MixtralForCausalLM"]
    if config.qk_layernorm:
        return FAMILIES["Qwen3ForCausalLM"]
    if config.add_qkv_bias and not config.add_bias_linear and not has_output_bias(model):
        return FAMILIES["Qwen2ForCausalLM"]
    biased = config.add_qkv_bias or config.add_bias_linear
    return FAMILIES["MistralForCausalLM" if getattr(config, "window_size", None) and not biased else "LlamaForCausalLM"]


def has_output_bias(model: MegatronModel) -> bool:
    """Whether attention's output projections have biases, though other linear layers have none."""
    names = (name for name, _ in model.named_parameters())
    return not model.config.add_bias_linear and any(name.endswith("self_attention.linear_proj.bias") for name in names)


def _windows(config: Any, family: Family) -> dict[str, Any]:
    if family.window == "none":
        return {}
    size = getattr(config, "window_size", None)
    described: dict[str, Any] = {"sliding_window": size[0] + 1 if size else None}
    if family.window == "all":
        return described
    described["use_sliding_window"] = bool(size)
    if family.window == "layers":
        slides = windowed_layers(config)
        described["layer_types"] = ["sliding_attention" if s else "full_attention" for s in slides]
        described["max_window_layers"] = slides.index(True) if any(slides) else config.num_layers
    return described


def _experts(config: Any, family: Family) -> dict[str, Any]:
    described = {"num_local_experts": config.num_moe_experts, "num_experts_per_tok": config.moe_router_topk}
    if family.model_type == "mixtral":
        return described | {"intermediate_size": config.moe_ffn_hidden_size}
    sparse = _per_layer(config.moe_layer_freq, config.num_layers)
    return described | {
        "num_experts": config.num_moe_experts,
        "moe_intermediate_size": config.moe_ffn_hidden_size,
        "norm_topk_prob": not config.moe_router_pre_softmax,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i, s in enumerate(sparse) if not s],
    }


def _per_layer(frequency: int | list[int], layers: int) -> list[int]:
    """``moe_layer_freq`` as a list."""
    if isinstance(frequency, int):
        return [int(i % frequency == 0) for i in range(layers)]
    return [int(bool(f)) for f in frequency]


def differences(model: MegatronModel, said: HuggingFaceConfig) -> Iterator[Problem]:
    """What a config says otherwise than the model computes."""
    remedy = "give the config of this very model, or one of the families that Hugging Face has"
    expected = _PLAIN | (_PLAIN_EXPERTS if said.family.experts else {}) | said.fields
    for training_only in ("moe_router_load_balancing_type", "moe_aux_loss_coeff"):
        expected.pop(training_only, None)
    for name, value in expected.items():
        own = _comparable(model, name, getattr(model.config, name, _PLAIN.get(name, _PLAIN_EXPERTS.get(name))))
        if own != _comparable(model, name, value):
            yield Problem(
                f"{name}={_shown(own)} in a {said.family.architecture}", f"its config says {_shown(value)}", remedy
            )
    for name, value in said.options.items():
        own = getattr(model.chunk, name)
        if own != value and name != "max_sequence_length":
            yield Problem(f"{name}={own!r} in a {said.family.architecture}", f"its config says {value!r}", remedy)
    if has_output_bias(model) != said.output_bias:
        has = "a bias" if has_output_bias(model) else "no bias"
        yield Problem(f"{has} in attention's output projections", "its config says otherwise (attention_bias)", remedy)
    if model.chunk.rotary_scaling and said.rope_scaling is None:
        found = "a model that does not tell how far its rotary frequencies are scaled"
        yield Problem("rope_scaling", found, "pass config={..., 'rope_scaling': {'rope_type': 'llama3', ...}}")


def _comparable(model: MegatronModel, name: str, value: Any) -> Any:
    layers = model.config.num_layers
    if name == "moe_layer_freq":
        return _per_layer(value, layers)
    if name == "window_attn_skip_freq":
        return windowed_layers(SimpleNamespace(num_layers=layers, window_size=(0, 0), window_attn_skip_freq=value))
    if name == "activation_func":
        return getattr(nn.functional, value) if isinstance(value, str) else value
    return tuple(value) if isinstance(value, list) else value


def _shown(value: Any) -> str:
    return getattr(value, "__name__", repr(value))
