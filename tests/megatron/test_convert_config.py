"""What a config.json says in Megatron-Core's words, what is refused, and folders that do not fit."""

import json
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from lightning_dcp import MegatronGPT
from lightning_dcp.errors import CheckpointError, ConfigurationError
from lightning_dcp.models.megatron.core_attention import windowed_layers
from lightning_dcp.models.megatron.huggingface import parse_config
from lightning_dcp.models.megatron.huggingface.families import FAMILIES
from lightning_dcp.models.megatron.huggingface.folder import ShardWriter, WeightFolder, index_of
from lightning_dcp.models.megatron.huggingface.names import Source, source_of
from lightning_dcp.models.megatron.problems import config_problems
from lightning_dcp.parallel.topology import Topology
from tests.megatron import hf
from tests.support.training import loader, trainer

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}


def raw(architecture, **more):
    return {"architectures": [architecture], **SIZES, **more}


def test_llama_3_1_as_it_is_on_the_hub():
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    said = parse_config(
        raw(
            "LlamaForCausalLM",
            rope_scaling={**scaling, "rope_type": "llama3"},
            rope_theta=500000.0,
            rms_norm_eps=1e-5,
            attention_bias=False,
            mlp_bias=False,
            max_position_embeddings=131072,
        )
    )
    assert said.rope_scaling == scaling
    assert said.options["rotary_base"] == 500000
    assert said.options["max_sequence_length"] == 131072
    assert not said.options["share_embeddings_and_output_weights"]
    assert (said.fields["kv_channels"], said.fields["num_query_groups"], said.fields["layernorm_epsilon"]) == (
        8,
        2,
        1e-5,
    )
    assert not (said.fields["add_bias_linear"] or said.fields["add_qkv_bias"] or said.output_bias)


@pytest.mark.parametrize(
    ("biases", "fields"),
    [
        ({"attention_bias": True}, (False, True, True)),
        ({"attention_bias": True, "mlp_bias": True}, (True, False, False)),
        ({}, (False, False, False)),
    ],
)
def test_biases_of_llama(biases, fields):
    said = parse_config(raw("LlamaForCausalLM", **biases))
    assert (said.fields["add_bias_linear"], said.fields["add_qkv_bias"], said.output_bias) == fields


def test_qwen_2_5_has_a_window_that_is_switched_off():
    said = parse_config(
        raw("Qwen2ForCausalLM", sliding_window=131072, use_sliding_window=False, max_window_layers=2, rope_theta=1e6)
    )
    assert "window_size" not in said.fields
    assert said.fields["add_qkv_bias"]
    assert not said.output_bias


@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_windows_in_some_layers(architecture):
    switched = {"sliding_window": 16, "use_sliding_window": True}
    by_number = parse_config(raw(architecture, **switched, max_window_layers=3)).fields
    assert by_number["window_size"] == (15, 0)
    assert by_number["window_attn_skip_freq"] == [0, 0, 0, 1]
    kinds = ["sliding_attention", "full_attention"] * 2
    assert parse_config(raw(architecture, **switched, layer_types=kinds)).fields["window_attn_skip_freq"] == [
        1,
        0,
        1,
        0,
    ]
    assert "window_attn_skip_freq" not in parse_config(raw(architecture, **switched, max_window_layers=0)).fields


def test_windows_of_all_layers():
    assert parse_config(raw("MistralForCausalLM", sliding_window=4096)).fields["window_size"] == (4095, 0)
    assert "window_size" not in parse_config(raw("MistralForCausalLM", sliding_window=None)).fields


def test_layers_without_experts():
    said = parse_config(
        raw(
            "Qwen3MoeForCausalLM",
            num_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            decoder_sparse_step=2,
            mlp_only_layers=[3],
            norm_topk_prob=True,
        )
    )
    fields = said.fields
    assert fields["moe_layer_freq"] == [0, 1, 0, 0]
    assert (fields["num_moe_experts"], fields["moe_router_topk"], fields["moe_ffn_hidden_size"]) == (8, 2, 32)
    assert not fields["moe_router_pre_softmax"]


def test_mixtral_has_the_base_that_transformers_gives_it():
    said = parse_config(raw("MixtralForCausalLM", num_local_experts=8))
    assert (said.options["rotary_base"], said.fields["moe_ffn_hidden_size"]) == (1_000_000, 80)
    assert "moe_layer_freq" not in said.fields


def test_all_that_would_be_computed_otherwise_is_refused_at_once():
    content = raw(
        "LlamaForCausalLM",
        hidden_act="gelu",
        quantization_config={"quant_method": "awq"},
        rope_scaling={"type": "yarn", "factor": 4.0},
        partial_rotary_factor=0.5,
        mlp_bias=True,
        layer_types=["full_attention", "linear_attention"],
    )
    with pytest.raises(ConfigurationError) as refused:
        parse_config(content)
    asked = " | ".join(problem.asked for problem in refused.value.problems)
    assert len(refused.value.problems) == 6
    for part in ("gelu", "awq", "yarn", "partial_rotary_factor=0.5", "mlp_bias", "linear_attention"):
        assert part in asked


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ({"architectures": ["Gemma3ForCausalLM"]}, "LlamaForCausalLM"),
        ({"architectures": ["LlamaForCausalLM"], "vocab_size": 96}, "without num_hidden_layers, hidden_size"),
        (raw("MixtralForCausalLM"), "num_local_experts"),
        (raw("MixtralForCausalLM", num_local_experts=2, router_jitter_noise=0.1), "router's alone"),
        (raw("LlamaForCausalLM", rope_scaling={"rope_type": "llama3", "factor": 8.0}), "no low_freq_factor"),
        (raw("LlamaForCausalLM", rope_parameters={"full_attention": {"rope_theta": 1.0}}), "one kind of positions"),
    ],
)
def test_configs_that_do_not_do(content, found):
    with pytest.raises(ConfigurationError, match=found):
        parse_config(content)


def test_no_folder(tmp_path):
    with pytest.raises(ConfigurationError, match="snapshot_download"):
        MegatronGPT.from_huggingface("meta-llama/Llama-3.1-8B")
    with pytest.raises(ConfigurationError, match=r"neither model\.safetensors nor"):
        WeightFolder(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    with pytest.raises(ConfigurationError, match=r"names model-1\.safetensors, which is not there"):
        WeightFolder(tmp_path)


def test_own_arguments_go_before_the_folders(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(raw("LlamaForCausalLM", tie_word_embeddings=True)))
    model = MegatronGPT(huggingface=tmp_path, config={"layernorm_epsilon": 1e-3}, rotary_base=77)
    assert model.config["layernorm_epsilon"] == 1e-3
    assert model.config["num_layers"] == 4
    assert model.gpt_options["rotary_base"] == 77
    assert model.gpt_options["vocab_size"] == 96
    assert model.gpt_options["share_embeddings_and_output_weights"]


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({}, "neither a config nor"),
        ({"config": {}, "rope_scaling": {"factor": 8.0}}, "no low_freq_factor"),
        (
            {"config": {}, "rope_scaling": dict(hf.LLAMA3), "position_embedding_type": "none"},
            "has no such frequencies",
        ),
    ],
)
def test_arguments_that_do_not_go_together(options, found):
    with pytest.raises(ConfigurationError, match=found):
        MegatronGPT(**options)


def test_saving_needs_a_run(tmp_path):
    with pytest.raises(ConfigurationError, match="in a hook such as on_train_end, or after a run"):
        MegatronGPT({"num_layers": 1}).save_huggingface(tmp_path)


def test_heads_lie_in_query_groups():
    heads, groups, size = 4, 2, 3
    queries = torch.arange(heads * size).reshape(-1, 1)
    keys = 100 + torch.arange(groups * size).reshape(-1, 1)
    source = Source(("q", "k", "v"), "groups")
    joined = source.join([queries, keys, 100 + keys], size)
    assert joined[:, 0].tolist() == [
        *(*range(6), 100, 101, 102, 200, 201, 202),
        *(*range(6, 12), 103, 104, 105, 203, 204, 205),
    ]
    parts = source.split(joined, size, groups)
    assert torch.equal(parts["q"], queries)
    assert torch.equal(parts["v"], 100 + keys)


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("mlp.experts.local_experts.3.linear_fc1.weight", ("w1", "w3")),
        ("mlp.experts.linear_fc1.weight3", ("w1", "w3")),
        ("mlp.experts.linear_fc2.weight3", ("w2",)),
    ],
)
def test_experts_by_either_kind_of_layer(name, names):
    source = source_of(f"decoder.layers.7.{name}", FAMILIES["MixtralForCausalLM"])
    assert source.names == tuple(f"model.layers.7.block_sparse_moe.experts.3.{n}.weight" for n in names)
    assert source_of(f"decoder.layers.7.{name}", FAMILIES["LlamaForCausalLM"]) is None


def test_shards_of_several_ranks_are_numbered_through(tmp_path):
    writers = [ShardWriter(tmp_path, rank, max_shard_bytes=40) for rank in range(2)]
    tensors = {name: torch.full((4, 2), float(i)) for i, name in enumerate("abc")}
    writers[0].add("a", tensors["a"])
    writers[0].add("b", tensors["b"])
    writers[1].add("c", tensors["c"])
    for writer in writers:
        writer.flush()
    assert not list(tmp_path.glob("model*"))
    every = [writer.written for writer in writers]
    for writer in writers:
        writer.publish(every)
    index = index_of(every)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert sorted(file.name for file in tmp_path.glob("*.safetensors")) == [
        f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)
    ]
    assert index["metadata"]["total_size"] == 96
    with WeightFolder(tmp_path) as folder:
        assert folder.shape("b") == (4, 2)
        assert torch.equal(folder.part("b"), tensors["b"])
        assert torch.equal(folder.part("c", 0, 1, 2), tensors["c"][2:])
        assert torch.equal(folder.part("c", 1, 1, 2), tensors["c"][:, 1:])


@pytest.mark.parametrize("skip", [None, 2, [0, 1, 1, 0, 1]])
@pytest.mark.parametrize("window", [None, (3, 0)])
def test_layers_have_windows_as_megatron_core_says(window, skip):
    from megatron.core.transformer.utils import is_layer_window_attention

    config = SimpleNamespace(num_layers=5, window_size=window, window_attn_skip_freq=skip)
    expected = [is_layer_window_attention(window, skip, number) for number in range(1, 6)]
    assert windowed_layers(config) == expected
    assert any(expected) == (window is not None)


def test_a_vocabulary_that_ranks_cannot_share_is_padded_where_it_comes_from():
    fields = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4}
    [problem] = config_problems(fields, Topology(2, tensor_model_parallel_size=2), vocab_size=17)
    assert "resize_token_embeddings(pad_to_multiple_of=2)" in problem.remedy
    assert "tensor_model_parallel_size=1" in problem.remedy


# ------------------------------------------------------------- with ranks

SMALL = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "num_query_groups": 2, "ffn_hidden_size": 24}
EXPERTS = {"num_moe_experts": 4, "moe_ffn_hidden_size": 12, "moe_router_load_balancing_type": "none"}
FROM_SCRATCH = {
    "LlamaForCausalLM": {
        "config": SMALL | {"add_qkv_bias": True, "kv_channels": 8},
        "attention_output_bias": True,
        "rope_scaling": {name: value for name, value in hf.LLAMA3.items() if name not in ("rope_type", "rope_theta")},
        "rotary_base": 100,
    },
    "Qwen2ForCausalLM": {
        "config": SMALL | {"add_qkv_bias": True, "window_size": [3, 0], "window_attn_skip_freq": 2},
        "share_embeddings_and_output_weights": True,
    },
    "MistralForCausalLM": {"config": SMALL | {"window_size": [3, 0]}},
    "Qwen3ForCausalLM": {"config": SMALL | {"qk_layernorm": True}},
    "Qwen3MoeForCausalLM": {
        "config": SMALL | EXPERTS | {"qk_layernorm": True, "moe_router_pre_softmax": True, "moe_layer_freq": 2}
    },
}


class FromScratch(hf.Imported):
    """Weights that are far from uniform attention."""

    def configure_model(self):
        super().configure_model()
        for number, weight in enumerate(self.model.parameters()):
            torch.nn.init.normal_(weight, std=0.3, generator=torch.Generator().manual_seed(number))


def written(root):
    """By what each model calls itself: its own logits and what transformers computes with the folder."""
    found = {}
    for name, options in FROM_SCRATCH.items():
        model = FromScratch(vocab_size=hf.SIZES["vocab_size"], **options)
        (own,) = trainer(strategy={}).predict(model, loader(hf.LENGTHS, len(hf.LENGTHS), "packed"))
        model.save_huggingface(root / name)
        found[name] = own[0], torch.cat(hf.logits(hf.read(root / name)))
    return found


def test_models_from_scratch_describe_themselves(ranks, tmp_path):
    for name, (own, theirs) in ranks.run(written, 1, tmp_path)[0].items():
        assert json.loads((tmp_path / name / "config.json").read_text())["architectures"] == [name]
        assert (own - theirs).abs().max() <= (1e-6 if "Moe" in name else 1e-9), name


def refusals(root):
    """What each of these says; the folder has a Llama of 4 layers."""
    hf.make("mistral", root / "model")
    llama = {"huggingface": root / "model"}
    return {
        "layers": failure(MegatronGPT(**llama, config={"num_layers": 2})),
        "sizes": failure(MegatronGPT(**llama, config={"ffn_hidden_size": 32})),
        "biases": failure(MegatronGPT(**llama, config={"add_bias_linear": True})),
        "again": failure(MegatronGPT(**llama), root / "model"),
        "no family": failure(MegatronGPT(SMALL | {"add_qkv_bias": True, "softmax_scale": 2.0}), root / "new"),
        "norms": failure(MegatronGPT(SMALL | {"normalization": "LayerNorm"}), root / "new"),
        "learned": failure(MegatronGPT(SMALL, 24, 64, position_embedding_type="learned_absolute"), root / "new"),
    }


def failure(model, out=None, strategy=None):
    try:
        trainer(strategy=strategy or {}).predict(model, loader((5, 3), 2, "packed"))
        model.save_huggingface(out)
    except ConfigurationError as error:
        return str(error)
    return "nothing"


def test_folders_and_models_that_do_not_fit(ranks, tmp_path):
    said = ranks.run(refusals, 1, tmp_path)[0]
    assert "18 tensor(s) that the model has no place for: model.layers.2." in said["layers"]
    assert "mlp.gate_proj.weight of shape [32, 16]" in said["sizes"]
    assert "found: [24, 16]" in said["sizes"]
    assert "no model.layers.0.self_attn.q_proj.bias" in said["biases"]
    assert "there already" in said["again"]
    assert "softmax_scale=2.0 in a Qwen2ForCausalLM" in said["no family"]
    assert "normalization='LayerNorm'" in said["norms"]
    assert "position_embedding_type='learned_absolute'" in said["learned"]
    assert not (tmp_path / "new").exists()


def half_a_folder(root):
    return failure(
        MegatronGPT.from_huggingface(root),
        strategy={"pipeline_model_parallel_size": 2, "max_seqlen_per_dp_cp_rank": 64},
    )


def test_what_one_stage_misses_every_rank_says(ranks, tmp_path):
    ranks.run(hf.make, 1, "mistral", tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    del content["weight_map"]["model.layers.3.mlp.down_proj.weight"]
    index.write_text(json.dumps(content))
    first, last = ranks.run(half_a_folder, 2, tmp_path)
    assert "no model.layers.3.mlp.down_proj.weight" in first
    assert first == last


def without_room(rank):
    """The disk is full after the first file of a rank."""
    flush = ShardWriter.flush

    def full(writer):
        if writer.rank == rank and writer.written:
            raise OSError(28, "No space left on device")
        flush(writer)

    return patch.object(ShardWriter, "flush", full)


def without_leave(rank):
    """A rank may not rename its files."""
    rename = Path.rename

    def denied(file, target):
        if f"part-{rank:05}" in file.name:
            raise PermissionError(13, "Permission denied")
        return rename(file, target)

    return patch.object(Path, "rename", denied)


def failures_to_write(root):
    """What each rank says where one cannot write, in the middle or at the end, and which files are left; then it can."""
    said = {}
    for layout, rank in (("tensor", 0), ("pipeline", 1)):
        folder, strategy = root / layout, {f"{layout}_model_parallel_size": 2, "max_seqlen_per_dp_cp_rank": 64}
        model = MegatronGPT(SMALL, 24, 64)
        trainer(strategy=strategy).predict(model, loader((5, 3), 2, "packed"))
        for broken in (without_room(rank), without_leave(rank)):
            with broken, pytest.raises(CheckpointError) as error:
                model.save_huggingface(folder, max_shard_bytes=3000)
            dist.barrier()
            said.setdefault(layout, []).append((str(error.value), [file.name for file in folder.iterdir()]))
        model.save_huggingface(folder, max_shard_bytes=3000)
        said[layout].append(len(list(folder.iterdir())))
    return said


def test_where_one_rank_cannot_write_all_say_so_and_nothing_is_left(ranks, tmp_path):
    first, second = ranks.run(failures_to_write, 2, tmp_path)
    assert first == second
    for rank, (full, denied, written) in enumerate(first.values()):
        assert f"rank {rank}: OSError: [Errno 28] No space left on device" in full[0]
        assert f"rank {rank}: PermissionError: [Errno 13] Permission denied" in denied[0]
        assert full[1] == denied[1] == []
        assert written > 4  # shards, the index and config.json
