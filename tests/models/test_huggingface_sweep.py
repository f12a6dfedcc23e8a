"""No causal or bare model that transformers has is wrong in silence: it is refused at set-up, or it is right on two ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModel, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_MAPPING_NAMES

from lightning_dcp.errors import RegionError
from lightning_dcp.models.dry_run import dry_run
from lightning_dcp.models.huggingface import transformer_adapter
from tests.models.regions import on_played_ranks, packed
from tests.models.test_huggingface_isolation import samples_of

SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "intermediate_size"), 32),
    **dict.fromkeys(("ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "num_key_value_heads"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("attention_dropout", "hidden_dropout", "dropout"), 0.0),
    **{"encoder_layers": 1, "vocab_size": 40, "head_dim": 8, "moe_intermediate_size": 16, "num_experts_per_tok": 2},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2, "sliding_window": 3},
    **{"rotary_dim": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "kv_lora_rank": 8},
    **{"q_lora_rank": 8, "is_decoder": True},
}
"""Small sizes under the names that one or another configuration has for them."""
LARGEST = 5_000_000
"""Parameters of a model with these sizes that has most of its sizes under other names."""


def tiny(kind: str, auto: Any) -> nn.Module | None:
    """A model of a type with small sizes; None if its configuration does not take them, or if it does not run by itself."""
    try:
        default = CONFIG_MAPPING[kind]()
        if default.sub_configs:
            return None
        own = {name: value for name, value in SIZES.items() if _is_number(getattr(default, name, None))}
        if auto is AutoModel:
            own.pop("is_decoder", None)
        config = CONFIG_MAPPING[kind](**own)
        with torch.device("meta"):
            if sum(p.numel() for p in auto.from_config(config).parameters()) > LARGEST:
                return None
        if hasattr(config, "_experts_implementation"):  # the default, a grouped product, has no float64
            config._experts_implementation = "eager"
        torch.manual_seed(0)
        model = auto.from_config(config).double().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(4) if parameter.dim() > 1 else None
        alone(model, samples_of((5,))[0])
    except Exception:  # whatever a configuration or a model says of sizes that others have
        return None
    return model


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def alone(model: nn.Module, ids: Tensor) -> Tensor:
    """What the model itself makes of one sample, ``[1, T, V or H]``."""
    with torch.no_grad():
        return first_output(model(input_ids=ids.unsqueeze(0)))


def first_output(out: Any) -> Tensor:
    return out.logits if "logits" in out else out.last_hidden_state


def of_batch(model: nn.Module, batch: Any) -> Tensor:
    with torch.no_grad():
        return first_output(model(input_ids=batch["input_ids"]))


def refused(model: nn.Module) -> bool:
    """Whether set-up has anything against it."""
    adapter = transformer_adapter(model, fused=False)
    return bool([*adapter.problems("model"), *adapter.mixing()] or dry_run(model, adapter=adapter).findings)


CASES = [(kind, AutoModelForCausalLM) for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES]
CASES += [(kind, AutoModel) for kind in MODEL_MAPPING_NAMES if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "auto"), CASES, ids=[f"{kind}-{auto.__name__}" for kind, auto in CASES])
def test_right_or_refused(kind: str, auto: Any) -> None:
    model = tiny(kind, auto)
    if model is None:
        # Not every configuration can be made tiny; a skip here says that nothing is known of this family.
        pytest.skip("not made with these sizes")
    if not refused(model):
        try:
            assert_right(model)
        except (
            RegionError
        ) as error:  # a pooled output, which is for a head of the user's outside, is refused when it is met
            assert "pooler_output" in str(error)
        except IndexError as error:  # a rotary table as long as the shard (Phi-MoE in transformers 4.57)
            assert "out of bounds" in str(error)


def assert_right(model: nn.Module) -> None:
    """On two ranks each sample gets what it gets alone in one process."""
    samples = samples_of((13, 9))  # 11 tokens on a rank: as many as no size above
    expected = torch.cat([alone(model, ids) for ids in samples], dim=1)
    for out in on_played_ranks(model, packed(samples), 2, of_batch):
        error = (out - expected).abs().max() / expected.abs().max()
        assert error.item() < 1e-5
