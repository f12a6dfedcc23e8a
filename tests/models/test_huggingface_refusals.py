"""What of Hugging Face models is refused at set-up, by name; and that nothing else is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from lightning_dcp.models.dry_run import dry_run
from lightning_dcp.models.huggingface.adapter import TransformerAdapter
from lightning_dcp.models.mixing import mixing_problem
from tests.models.families import FAMILIES, MORE, SIZES, TRANSFORMERS_5, WITHOUT_INTERFACE, build, lacking
from tests.models.oracle import DENSE
from tests.support.training import VOCAB


def problems_of(model: nn.Module, *, fused: bool = False) -> str:
    """Everything that set-up finds, in words, with the paths of layers."""
    adapter = TransformerAdapter(model, fused=fused)
    problems = [*adapter.problems("model"), *adapter.problems_on_device("model")]
    mixing = adapter.mixing()
    problems += [mixing_problem(name, layer) for name, layer in mixing.items()]
    run = dry_run(model, adapter=adapter)
    texts = [f"{p.asked}: {p.found}" for p in problems] + [
        f"layer {f.layer} ({f.kind}): {f.found}" for f in run.findings
    ]
    if run.skipped is not None and not texts:
        texts.append(f"not looked at: {run.skipped}")
    return "\n".join(texts)


NO_ALARM = [name for name in FAMILIES | MORE if name not in lacking(FAMILIES | MORE) and name not in WITHOUT_INTERFACE]


@pytest.mark.parametrize("fused", [False, True], ids=["logits", "fused"])
@pytest.mark.parametrize("family", NO_ALARM)
def test_no_false_alarm(family: str, fused: bool) -> None:
    assert problems_of(build(family), fused=fused) == ""


SAME = 5
"""Tokens of a dry run, experts, heads, dimensions of a head, and so on: nothing may be taken for attention by hand."""
EQUAL = {
    "mixtral": {"num_local_experts": SAME, "num_experts_per_tok": 2, "num_key_value_heads": SAME},
    "qwen3-moe": {"num_experts": SAME, "num_experts_per_tok": 2, "num_key_value_heads": SAME},
    "gpt-oss": {"num_local_experts": SAME, "num_experts_per_tok": 2, "num_key_value_heads": SAME},
    "deepseek-v3": {"n_routed_experts": SAME, "n_group": 1, "topk_group": 1, "num_key_value_heads": SAME},
    "llama": {"num_key_value_heads": SAME},
    "gemma2": {"num_key_value_heads": SAME},
}


@pytest.mark.parametrize("tokens", [5, 7])
@pytest.mark.parametrize("family", EQUAL)
def test_sizes_equal_to_the_number_of_tokens(family: str, tokens: int) -> None:
    """The dry runs have 5 and 7 tokens."""
    sizes = {name: tokens if value == SAME else value for name, value in EQUAL[family].items()}
    heads = {
        "num_attention_heads": tokens,
        "hidden_size": 2 * tokens,
        "vocab_size": tokens,
        "intermediate_size": tokens,
    }
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    assert problems_of(build(family, **(heads | ids | sizes))) == ""


# --- layers and settings that are refused


def causal(kind: str, **own: Any) -> Callable[[], PreTrainedModel]:
    def make() -> PreTrainedModel:
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(SIZES | own)))

    return make


def changed(family: str, attention: str = DENSE, **changes: Any) -> Callable[[], PreTrainedModel]:
    def make() -> PreTrainedModel:
        model = build(family, attention=attention)
        for name, value in changes.items():
            setattr(model.config, name, value)
        return model

    return make


_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 4, "mamba_n_groups": 1}
_HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
_DELTA = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8},
}
_JAMBA = {
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "num_experts": 1,
    "use_mamba_kernels": False,
    "mamba_d_state": 4,
}
_RECURRENT = {"lru_width": 16, "block_types": ("recurrent", "attention")}

REFUSED: dict[str, tuple[Callable[[], PreTrainedModel], list[str]]] = {
    "mamba": (causal("mamba", state_size=4), ["backbone.layers.0.mixer"]),
    "mamba2": (causal("mamba2", state_size=4, num_heads=4, head_dim=8, n_groups=1), ["backbone.layers.1.mixer"]),
    "jamba": (causal("jamba", **_JAMBA), ["model.layers.0.mamba"]),
    "qwen3_next": (causal("qwen3_next", **_HYBRID, **_DELTA), ["model.layers.0.linear_attn", "linear_attention"]),
    "recurrent_gemma": (causal("recurrent_gemma", **_RECURRENT), ["model.layers.0.temporal_block"]),
    "lfm2": (causal("lfm2", layer_types=["conv", "full_attention"]), ["model.layers.0.conv", "conv"]),
    "falcon_h1": (causal("falcon_h1", **_MAMBA, mamba_d_ssm=32), ["model.layers.0.mamba", "model.layers.1.mamba"]),
    "bamba": (causal("bamba", **_MAMBA, attn_layer_indices=[1], mamba_expand=2), ["model.layers.0.mamba"]),
    "rwkv": (causal("rwkv", attention_hidden_size=16), ["rwkv.blocks.0", "rwkv.blocks.1"]),
    "llama4": (
        causal("llama4_text", num_local_experts=2, intermediate_size_mlp=24, attention_chunk_size=8, moe_layers=[]),
        ["chunked_attention"],
    ),
    "doge": (causal("doge"), ["model.layers.0.self_attn", "reads its mask"]),
    "router losses": (changed("mixtral", output_router_logits=True), ["output_router_logits"]),
    "attention weights": (changed("llama", "eager", output_attentions=True), ["output_attentions"]),
    "cross attention": (
        lambda: build("gpt2", add_cross_attention=True),
        ["transformer.h.0.crossattention", "transformer.h.1.crossattention"],
    ),
    "attention dropout": (
        lambda: build("llama", attention_dropout=0.1).train(),
        ["model.layers.0.self_attn", "model.layers.1.self_attn", "dropout"],
    ),
    "dynamic rope": (
        lambda: build("llama", **rope({"rope_type": "dynamic", "factor": 2.0})),
        ["dynamic"],
    ),
    "long rope": (
        lambda: build(
            "phi3",
            head_dim=4,
            **rope(
                {"rope_type": "longrope", "short_factor": [1.0] * 2, "long_factor": [2.0] * 2, "factor": 2.0},
                original_max_position_embeddings=64,
            ),
        ),
        ["longrope"],
    ),
}


def rope(parameters: dict[str, Any], **others: Any) -> dict[str, Any]:
    """Rotary settings, as either version of transformers calls them."""
    if TRANSFORMERS_5:
        return {"rope_parameters": {"rope_theta": 10000.0} | parameters | others} | others
    if parameters["rope_type"] == "longrope":
        parameters = {"type": "longrope"} | {name: parameters[name] for name in ("short_factor", "long_factor")}
    return {"rope_scaling": parameters} | others


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(case: str) -> None:
    make, words = REFUSED[case]
    found = problems_of(make())
    for word in words:
        assert word in found, found


def test_every_refused_kind_is_known_to_transformers() -> None:
    kinds = {
        "mamba",
        "mamba2",
        "jamba",
        "qwen3_next",
        "recurrent_gemma",
        "lfm2",
        "falcon_h1",
        "bamba",
        "rwkv",
        "llama4_text",
    }
    assert kinds <= set(transformers.CONFIG_MAPPING)


_BART = {"d_model": 16, "decoder_attention_heads": 2, "decoder_ffn_dim": 24, "decoder_layers": 1, "encoder_layers": 1}
WITHOUT_POSITIONS = [
    *(
        "BartForCausalLM",
        "BlenderbotForCausalLM",
        "BlenderbotSmallForCausalLM",
        "MarianForCausalLM",
        "MBartForCausalLM",
    ),
    *("PegasusForCausalLM", "PLBartForCausalLM", "WhisperForCausalLM"),
]


@pytest.mark.parametrize("name", WITHOUT_POSITIONS)
def test_models_that_cannot_be_told_positions_are_refused(name: str) -> None:
    kind = getattr(transformers, name)
    sizes = _BART | {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    found = problems_of(kind(kind.config_class(**sizes, decoder_start_token_id=2)))
    assert "forward has no position_ids" in found


def test_encoder_decoders_are_refused() -> None:
    config = AutoConfig.for_model(
        "t5", vocab_size=VOCAB, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    found = problems_of(transformers.T5ForConditionalGeneration(config))
    assert "encoder-decoder" in found
    assert "decoder.block.0.layer.1" in found


def test_all_problems_at_once() -> None:
    model = build("mixtral", attention_dropout=0.1, num_hidden_layers=2).train()
    model.config.output_router_logits = True
    model.model.layers[1].self_attn.mixer = nn.LSTM(16, 16)
    found = problems_of(model)
    for word in ("output_router_logits", "layers.0.self_attn", "dropout", "layers.1.self_attn.mixer (LSTM)"):
        assert word in found.replace("'", ""), found


def test_mask_functions_of_the_users_are_refused_by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import modeling_llama

    own = modeling_llama.create_causal_mask

    def with_sight_of_the_first(*args: Any, **kwargs: Any) -> Any:
        return own(*args, **kwargs, or_mask_function=lambda b, h, q, k: k == 0)

    model = build("llama")
    monkeypatch.setattr(modeling_llama, "create_causal_mask", with_sight_of_the_first)
    found = problems_of(model)
    for layer in ("model.layers.0.self_attn", "model.layers.1.self_attn"):
        assert layer in found
    assert "or_masks" in found


@pytest.mark.skipif(not TRANSFORMERS_5, reason="in 4.57 this family attends by torch's function without a mask")
def test_attention_with_masks_of_its_own_is_refused_by_layer() -> None:
    found = problems_of(build("falcon"))
    assert "transformer.h.0.self_attention" in found
    assert "attn_mask is given" in found
