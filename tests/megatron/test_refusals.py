"""What cannot be right of a Megatron-Core model is refused at set-up: all problems in one error, each with its remedy."""

from __future__ import annotations

import inspect
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from lightning_dcp import ConfigurationError, DCPStrategy, MegatronGPT, MegatronModel
from lightning_dcp.errors import BatchError, PlanError, RegionError
from lightning_dcp.models.megatron import compat, layer_spec, model_parallel_fields
from lightning_dcp.models.megatron.core_attention import ContextParallelCoreAttention
from lightning_dcp.models.megatron.gpt_problems import backend_problems, given_problems, gpt_problems
from lightning_dcp.models.megatron.model import REFUSED_ARGUMENTS
from lightning_dcp.models.megatron.norm import TorchNorm
from lightning_dcp.models.megatron.not_run import NOT_RUN, WITH_TRANSFORMER_ENGINE
from lightning_dcp.models.megatron.positions import position_problems
from lightning_dcp.models.megatron.problems import config_problems
from lightning_dcp.models.megatron.stages import stage_problems
from lightning_dcp.parallel.topology import Topology
from lightning_dcp.parallel.watchdog import Watchdog
from lightning_dcp.schedule.megatron import DEFAULT_DYNAMIC
from tests.megatron import runs
from tests.megatron.engine import transformer_engine
from tests.support.plans import GivenPlan
from tests.support.ranks import RankPool
from tests.support.training import TinyModule, loader, trainer

TP, PP, VPP, EP = (f"{name}_model_parallel_size" for name in ("tensor", "pipeline", "virtual_pipeline", "expert"))
GOOD = runs.DENSE | {"attention_dropout": 0.0}


def topology(world: int = 8, **sizes: Any) -> Topology:
    return Topology(world, **sizes)


# ------------------------------------------------------------------------------------------------ fields, without ranks

FIELDS: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    "layers": ({"num_layers": 5}, {PP: 2}, ["num_layers=5", "which 2 does not divide", "use num_layers=4 or 6"]),
    "layers of chunks": (
        {"num_layers": 6},
        {PP: 2, VPP: 2},
        [f"{VPP}=2", "which 4 does not divide", "num_layers=4 or 8"],
    ),
    "embedding as a layer": (
        {"num_layers": 4, "account_for_embedding_in_pipeline_split": True},
        {PP: 2},
        ["the embedding as a layer", "5 layers", "num_layers=3 or 5"],
    ),
    "first stage": (
        {"num_layers": 6, "num_layers_in_first_pipeline_stage": 1},
        {PP: 3},
        ["num_layers_in_first_pipeline_stage=1", "5 layers for the 2 stage(s) left"],
    ),
    "first and last stage": (
        {"num_layers": 6, "num_layers_in_first_pipeline_stage": 1, "num_layers_in_last_pipeline_stage": 2},
        {PP: 2},
        ["3 layers for the 0 stage(s) left", "use num_layers=3"],
    ),
    "chunks of the first stage": (
        {"num_layers": 7, "num_layers_in_first_pipeline_stage": 3},
        {PP: 2, VPP: 2},
        ["num_layers_in_first_pipeline_stage=3", "2 chunk(s) on each stage", "use a multiple of 2"],
    ),
    "heads": (
        {"hidden_size": 24, "num_attention_heads": 6, "num_query_groups": 6},
        {TP: 4},
        ["num_attention_heads=6", "that 4 does not divide", "8, say", f"{TP}=3"],
    ),
    "heads of the hidden size": (
        {"hidden_size": 18},
        {},
        ["hidden_size=18", "num_attention_heads=4", "hidden_size of 20"],
    ),
    "overlap without chunks": ({"overlap_p2p_comm": True}, {PP: 2}, ["overlap_p2p_comm=True", "plain 1F1B"]),
    "norms computed again": (
        {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "layernorm"]},
        {},
        ["recompute_modules=['core_attn', 'layernorm']", "leave layernorm out"],
    ),
    "modules that are not computed again": (
        {"recompute_modules": ["core_attn", "layernorm"]},
        {},
        ["recompute_granularity=None", "does nothing", "recompute_granularity='selective'"],
    ),
    "number as text": (
        {"num_moe_experts": "4", "moe_token_dispatcher_type": "alltoall"},
        {EP: 2},
        ["num_moe_experts='4'", "a number as text", "num_moe_experts: 4"],
    ),
    "exponent as text": ({"layernorm_epsilon": "1e-5"}, {}, ["layernorm_epsilon: 1e-05"]),
    "hidden size as text": ({"hidden_size": "16"}, {}, ["write it as a number: hidden_size: 16"]),
    "switch as text": ({"qk_layernorm": "False"}, {}, ["a switch as text", "qk_layernorm: false"]),
    "one chunk": ({}, {PP: 2, VPP: 1}, [f"{VPP}=1", "use 2 or more, or leave it out"]),
    "groups": ({}, {TP: 4}, [f"num_query_groups=2 with {TP}=4", f"{TP}=2"]),
    "heads of groups": ({"num_query_groups": 3}, {}, ["num_query_groups=3", "num_attention_heads=4"]),
    "feed-forward": ({"ffn_hidden_size": 25}, {TP: 2}, ["ffn_hidden_size=25", "(26, say)"]),
    "experts' feed-forward": (
        {"num_moe_experts": 4, "moe_ffn_hidden_size": 9},
        {TP: 2, "sequence_parallel": True},
        ["moe_ffn_hidden_size=9", "expert_tensor_parallel_size=2"],
    ),
    "no layers": ({"num_layers": None}, {PP: 2}, ["num_layers=None", "not a positive whole number"]),
    "no experts": ({}, {EP: 2}, [f"{EP}=2", "a model without experts"]),
    "experts": ({"num_moe_experts": 3, "moe_token_dispatcher_type": "alltoall"}, {EP: 2}, ["num_moe_experts=3"]),
    "dispatcher": (
        {"num_moe_experts": 4, "moe_token_dispatcher_type": "allgather"},
        {PP: 2},
        ["moe_token_dispatcher_type='allgather'", "variable_seq_lengths", "'alltoall'"],
    ),
    "lengths": ({"variable_seq_lengths": False}, {PP: 2}, ["variable_seq_lengths=False", "model_parallel_fields"]),
    "arity": ({"calculate_per_token_loss": False}, {}, ["calculate_per_token_loss=False", "model_parallel_fields"]),
    "dtype of stages": (
        {"pipeline_dtype": torch.float32, "params_dtype": torch.bfloat16},
        {PP: 2},
        ["pipeline_dtype=torch.float32", "use pipeline_dtype=torch.bfloat16"],
    ),
    "residuals": (
        {"fp32_residual_connection": True, "params_dtype": torch.bfloat16},
        {PP: 2},
        ["fp32_residual_connection=True", "torch.bfloat16"],
    ),
    "size": ({TP: 1}, {TP: 2}, [f"{TP}=1 in the TransformerConfig", "2 in the strategy", "model_parallel_fields"]),
    "static CP": ({"context_parallel_size": 2}, {}, ["context_parallel_size=2", "a CP group of its own"]),
    "messages of two stages": ({"batch_p2p_comm": True}, {PP: 2, VPP: 2}, ["batch_p2p_comm", "overlap_p2p_comm=True"]),
    "groups of micro-batches": (
        {"microbatch_group_size_per_vp_stage": 3},
        {PP: 2, VPP: 2},
        ["microbatch_group_size_per_vp_stage=3", "leave it out"],
    ),
}


@pytest.mark.parametrize("case", FIELDS)
def test_fields_that_do_not_fit_are_named_with_a_remedy(case: str) -> None:
    fields, sizes, words = FIELDS[case]
    [problem] = config_problems(GOOD | fields, topology(**sizes))
    for word in words:
        assert word in str(problem)


def test_a_vocabulary_is_shared_out_equally() -> None:
    [problem] = config_problems(GOOD, topology(tensor_model_parallel_size=2), vocab_size=17)
    assert "vocab_size=17" in problem.asked
    assert "(18, say)" in problem.remedy


def test_what_fits_is_let_through() -> None:
    for fields, sizes in (
        (GOOD, {}),
        (GOOD, {TP: 2, "sequence_parallel": True}),
        (GOOD, {PP: 2, VPP: 2}),
        (GOOD | {"num_layers": 6, "num_layers_in_first_pipeline_stage": 2}, {PP: 3}),
        (
            GOOD | {"num_layers": 2, "num_layers_in_first_pipeline_stage": 1, "num_layers_in_last_pipeline_stage": 1},
            {PP: 2},
        ),
        (
            GOOD
            | {"num_layers": 6}
            | dict.fromkeys(("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"), True),
            {PP: 2, VPP: 2},
        ),
        (GOOD | {"num_layers": 3, "pipeline_model_parallel_layout": "Et|tt|L"}, {PP: 3}),
        (runs.MOE | {"attention_dropout": 0.0}, {EP: 2, PP: 2}),
    ):
        assert config_problems(fields, topology(24, **sizes), vocab_size=24) == []


@pytest.mark.parametrize("name", NOT_RUN)
def test_what_does_not_run_is_refused(name: str) -> None:
    value = {"attention_dropout": 0.1, "cuda_graph_impl": "local", "grad_scale_func": torch.mean}.get(name, True)
    [problem] = config_problems(GOOD | {name: value}, topology())
    assert problem.asked.startswith(f"{name}=")
    assert config_problems(GOOD | {name: "none" if name == "cuda_graph_impl" else None}, topology()) == []


@pytest.mark.parametrize("name", WITH_TRANSFORMER_ENGINE)
def test_what_only_transformer_engine_does_is_refused_without_it(name: str) -> None:
    fields = GOOD | {name: "hybrid" if name.startswith("fp") else True}
    [problem] = config_problems(fields, topology())
    assert name in problem.asked and "backend='transformer_engine'" in problem.remedy
    assert config_problems(fields, topology(), transformer_engine=True) == []


def test_all_problems_come_at_once() -> None:
    fields = GOOD | {
        "num_layers": 5,
        "num_query_groups": 4,
        "ffn_hidden_size": 25,
        "attention_dropout": 0.1,
        "fp8": "e4m3",
    }
    found = config_problems(fields, topology(16, **{TP: 8, PP: 2}), vocab_size=17)
    assert [problem.asked.split("=")[0] for problem in found] == [
        "num_attention_heads",
        "vocab_size",
        "ffn_hidden_size",
        "num_layers",
        "attention_dropout",
        "fp8",
    ]


@pytest.mark.parametrize("backend", ["transformer_engine", "te"])
def test_backends(backend: str) -> None:
    [problem] = backend_problems(backend, on_gpu=False)
    assert f"backend={backend!r}" in problem.asked
    assert "local" in problem.remedy


@pytest.mark.parametrize("kind", ["mrope", "relative"])
def test_positions(kind: str) -> None:
    [problem] = position_problems(kind)
    assert f"position_embedding_type={kind!r}" in problem.asked


def test_yarn_needs_a_config_that_has_its_fields() -> None:
    """No TransformerConfig of a release has: GPTModel would fail for want of them."""
    [problem] = position_problems("yarn")
    assert "without yarn_rotary_scaling_factor" in problem.found
    assert list(position_problems("yarn", YARN)) == []
    assert "yarn" not in str(inspect.signature(MegatronGPT).parameters["position_embedding_type"].annotation)


def gpt(fields: dict[str, Any], **said: Any) -> list[str]:
    """What is refused of a MegatronGPT with these fields."""
    known = {"settled": {}, "defaults": {"attention_dropout": 0.0}, "topology": topology()}
    sizes = {"backend": "auto", "on_gpu": False, "vocab_size": 18}
    return [str(problem) for problem in gpt_problems(runs.DENSE | fields, **known, **sizes, **said)]


@pytest.mark.parametrize(
    ("fields", "said", "words"),
    [
        ({"kv_channels": 7}, {}, "kv_channels=7"),
        ({"hidden_size": 12}, {}, "hidden_size=12 with 4 attention heads"),
        ({"kv_channels": 7}, {"rotary_percent": 0.5}, None),
        ({"kv_channels": 7}, {"positions": "none"}, None),
        ({"kv_channels": 8}, {}, None),
    ],
)
def test_rotary_embeddings_turn_pairs(fields: dict[str, Any], said: dict[str, Any], words: str | None) -> None:
    found = gpt(fields, **said)
    assert len(found) == (words is not None)
    assert all(words in text and "an odd size" in text for text in found if words)


def test_grouped_experts_need_transformer_engine() -> None:
    fields = {**runs.MOE, "moe_grouped_gemm": True}
    [said] = gpt(fields)
    assert "moe_grouped_gemm=False" in said
    assert gpt({**fields, "moe_grouped_gemm": False}) == []


def test_modules_that_a_made_config_says_itself_are_let_through() -> None:
    """A TransformerConfig fills in core_attn where nobody asks for anything; what somebody gives does nothing."""
    fields = GOOD | {"recompute_modules": ["core_attn"], "recompute_granularity": None}
    assert config_problems(fields, topology(), built=True) == []
    assert len(config_problems(fields, topology())) == 1
    assert config_problems(fields | {"moe_layer_recompute": True}, topology()) == []


@pytest.mark.parametrize(("kind", "longest"), [("learned_absolute", None), ("rope", 0), ("none", True)])
def test_longest_samples(kind: str, longest: Any) -> None:
    [said] = gpt({}, positions=kind, longest=longest)
    assert "max_sequence_length" in said
    assert gpt({}, positions=kind, longest=64) == []


@pytest.mark.parametrize("name", ["bf16", "fp16", "enable_autocast", "autocast_dtype"])
def test_precision_is_the_trainers(name: str) -> None:
    [problem] = given_problems({name: torch.bfloat16 if name == "autocast_dtype" else True}, {}, {name})
    assert name in problem.asked and "Trainer(precision=...)" in problem.remedy
    assert list(given_problems({name: None}, {}, {name})) == []


def test_transformer_engine_that_is_there_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_dcp.models.megatron.gpt_problems.has_transformer_engine", lambda: True)
    [problem] = backend_problems("transformer_engine", on_gpu=False)
    assert "a run on CPUs" in problem.found
    assert list(backend_problems("transformer_engine", on_gpu=True)) == []


def test_fields_that_are_not_the_users_to_give() -> None:
    given = {"num_layer": 2, TP: 4, "params_dtype": "bf16", "activation_func": "swishy"}
    settled = {TP: 2, "params_dtype": torch.float32}
    known = {"num_layers", TP, "params_dtype", "activation_func"}
    asked = {problem.asked.split("=")[0]: problem for problem in given_problems(given, settled, known)}
    assert set(asked) == {"num_layer", TP, "params_dtype", "activation_func"}
    assert asked["num_layer"].remedy == "did you mean num_layers?"
    assert list(given_problems({TP: 2}, settled, known)) == []


def test_stages_agree_with_megatron_core() -> None:
    """What we let through, Megatron-Core's own rule lets through, and no more."""
    from megatron.core.transformer.transformer_block import get_num_layers_to_build

    names = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
    accounts = "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"
    even = [{name: i >> k & 1 == 1 for k, name in enumerate(accounts)} for i in range(4)]
    uneven = [{names[0]: 1}, {names[1]: 2}, {names[0]: 2, names[1]: 2}]
    for layers in range(1, 9):
        for chunks in (None, 2):
            for own in even + uneven:
                fields = dict.fromkeys(names) | dict.fromkeys(accounts, False) | own | {"num_layers": layers}
                sizes = {PP: 3, VPP: chunks}
                config = SimpleNamespace(**fields, **sizes, pipeline_model_parallel_layout=None)
                ours = not list(stage_problems(fields, topology(6, **sizes)))
                assert ours == _builds(get_num_layers_to_build, config, layers, chunks), (fields, sizes)


def _builds(rule: Any, config: Any, layers: int, chunks: int | None) -> bool:
    """Whether the stages' layers are all of the model's, none of them less than nothing."""
    try:
        stages = [
            rule(config, vp_stage=chunk if chunks else None, pp_rank=stage)
            for stage in range(3)
            for chunk in range(chunks or 1)
        ]
    except AssertionError:
        return False
    left = layers - sum(getattr(config, f"num_layers_in_{end}_pipeline_stage") or 0 for end in ("first", "last"))
    return sum(stages) == layers and min(stages) >= 0 and left > 0


# ----------------------------------------------------------------------------------------------------- the strategy's


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({PP: 2, "schedule_mode": "free"}, ["schedule_mode='free'", f"{PP}=2", "schedule_mode='lockstep'"]),
        ({EP: 2, "schedule_mode": "free"}, ["schedule_mode='free'", f"{EP}=2"]),
        ({PP: 2, "scheduler": "megatron"}, ["scheduler='megatron'", f"{PP}=2", "leave scheduler out"]),
        ({EP: 2, "scheduler": "megatron"}, ["scheduler='megatron'", f"{EP}=2"]),
        ({"expert_tensor_parallel_size": 2, "scheduler": "megatron"}, ["scheduler='megatron'", "expert_tensor"]),
        ({TP: 2, "outputs": "sharded"}, ["outputs='sharded'", f"{TP}=2", 'use outputs="gathered"']),
        ({TP: 2, "outputs": "auto"}, ["outputs='auto'", f"{TP}=2"]),
        ({TP: 2, "fused_linear_cross_entropy": True}, ["fused_linear_cross_entropy=True", "leave it out"]),
    ],
)
def test_options_that_split_models_do_not_go_with(options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        DCPStrategy(**options)
    [problem] = caught.value.problems
    for word in words:
        assert word in str(problem)


def test_megatrons_scheduler_goes_where_ranks_need_not_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or where all of its plans are for lock-step."""
    assert DCPStrategy(**{TP: 2}, scheduler="megatron").scheduler_choice.kind == "megatron"
    monkeypatch.setattr("lightning_dcp.checks.available_megatron_scheduler", lambda: DEFAULT_DYNAMIC)
    assert DCPStrategy(**{PP: 2}, scheduler="megatron").scheduler_choice.kind == "megatron"


def test_lockstep_is_the_default_where_ranks_meet() -> None:
    assert DCPStrategy(**{PP: 2}).scheduler_choice.schedule_mode == "lockstep"
    assert DCPStrategy(**{TP: 2}, schedule_mode="free").scheduler_choice.schedule_mode == "free"


# ----------------------------------------------------------------------------------------------------- with two ranks


class Own(runs.SmallGPT):
    """A model of the user's own making: ``change`` does something to it.

    Args:
        fields: of the TransformerConfig, in place of those that strategy and precision give.
        change: called with the module when its model is made.
    """

    def __init__(self, fields: dict[str, Any] | None = None, change: Any = None) -> None:
        super().__init__(runs.DENSE)
        self.fields, self.change = fields or {}, change or (lambda module: None)
        self.spec: Any = layer_spec
        self.positions, self.attributes = "rope", dict[str, Any]()

    def configure_model(self) -> None:
        if not isinstance(self.model, MegatronModel):
            self.model = MegatronModel(self.provider)
            self.change(self)

    def provider(self, pre_process: bool, post_process: bool, vp_stage: int | None) -> nn.Module:
        from megatron.core.models.gpt import GPTModel
        from megatron.core.transformer import TransformerConfig

        dtype = torch.float64
        layout = {**model_parallel_fields(self.trainer.strategy), "params_dtype": dtype, "pipeline_dtype": dtype}
        own = {"attention_dropout": 0.0, "use_cpu_initialization": True, "moe_token_dispatcher_type": "alltoall"}
        fields = {**runs.DENSE, **own, **layout, **self.fields}
        config = TransformerConfig(**fields)
        vars(config).update(self.attributes)
        self.stages = {"pre_process": pre_process, "post_process": post_process, "vp_stage": vp_stage}
        kind = {"position_embedding_type": self.positions}
        return GPTModel(config, self.spec(config), runs.VOCABULARY, 12, **kind, **self.stages)


class Yarn(Own):
    """Positions that no release's TransformerConfig has the fields of; attributes of the user's own may take their place."""

    def __init__(self, attributes: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.positions, self.attributes = "yarn", attributes or {}


class OwnBackward(Own):
    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(2 * loss, *args, **kwargs)


class LocalLayers(Own):
    """Layers as Megatron-Core makes them, norms and all."""

    def __init__(self, experts: bool = False) -> None:
        super().__init__({"num_moe_experts": 4, "add_bias_linear": False} if experts else None)
        self.spec = _local_spec


def _local_spec(config: Any) -> Any:
    from megatron.core.models.gpt import gpt_layer_specs

    return gpt_layer_specs.get_gpt_decoder_block_spec(config, use_transformer_engine=False)


class Bare(Own):
    """A GPTModel that is not in a MegatronModel."""

    def configure_model(self) -> None:
        self.model = MegatronModel(self.provider).chunks[0]


def _compile(module: Any) -> None:
    module.model = torch.compile(module.model)


def _compile_layer(module: Any) -> None:
    module.model.chunks[0].decoder.layers[0].compile()


def _second(module: Any) -> None:
    module.reference = MegatronModel(module.provider)


def _batch_norm(module: Any) -> None:
    module.model.chunks[0].decoder.layers[0].add_module("extra", nn.BatchNorm1d(16))


def _unmasked(module: Any) -> None:
    from megatron.core.transformer.enums import AttnMaskType

    for layer in module.model.chunks[0].decoder.layers:
        layer.self_attention.attn_mask_type = AttnMaskType.no_mask


def _manual(module: Any) -> None:
    module.automatic_optimization = False


YARN = SimpleNamespace(
    yarn_rotary_scaling_factor=4.0,
    yarn_original_max_position_embeddings=4,
    yarn_beta_fast=32.0,
    yarn_beta_slow=1.0,
    yarn_mscale=1.0,
    yarn_mscale_all_dim=0.0,
    yarn_correction_range_round_to_int=True,
)

MODULES: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any], list[list[str]]]] = {
    "what is right": (Own, (), {PP: 2}, []),
    "plain module": (
        TinyModule,
        (),
        {TP: 2},
        [[f"{TP}=2", "no MegatronModel in TinyModule", "use MegatronGPT"]],
    ),
    "bare GPTModel": (Bare, (), {}, [["GPTModel 'model' outside a MegatronModel", "MegatronModel(provider)"]]),
    "foreign attention": (
        LocalLayers,
        (),
        {},
        [["layer 'model.chunks.0.decoder.layers.0.self_attention'", "and 3 more", "DotProductAttention", "layer_spec"]],
    ),
    "foreign router": (
        LocalLayers,
        (True,),
        {},
        [["self_attention", "layer_spec(config)"], ["layers.0.mlp.router' (TopKRouter)", "layer_spec(config)"]],
    ),
    "no causal mask": (Own, ({}, _unmasked), {}, [["attn_mask_type=no_mask", "use AttnMaskType.causal"]]),
    "batch statistics": (Own, ({}, _batch_norm), {}, [["extra' (BatchNorm1d)"]]),
    "yarn": (Yarn, (), {}, [["position_embedding_type='yarn'", "without yarn_rotary_scaling_factor", "use 'rope'"]]),
    "yarn with attributes for it": (Yarn, (vars(YARN),), {}, []),
    "backward of its own": (OwnBackward, (), {PP: 2}, [[f"OwnBackward.backward with {PP}=2", "remove it"]]),
    "backward of its own, without a pipeline": (OwnBackward, (), {}, []),
    "another norm": (
        MegatronGPT,
        ({**runs.DENSE, "normalization": "L2Norm"}, 18),
        {},
        [["normalization='L2Norm'", "use one of ['LayerNorm', 'RMSNorm']"]],
    ),
    "learned positions without an end": (
        MegatronGPT,
        ({**runs.DENSE, "bf16": True}, 18, None, "learned_absolute"),
        {},
        [["bf16=True"], ["no max_sequence_length"]],
    ),
    "text in a config of one's own": (
        Own,
        ({"layernorm_epsilon": "1e-5", "kv_channels": 7},),
        {},
        [["layernorm_epsilon='1e-5'", "a number as text"], ["kv_channels=7", "an odd size"]],
    ),
    "what Megatron-Core refuses of a provider": (
        Own,
        ({"ffn_hidden_size": 33},),
        {TP: 2},
        [["the provider Own.provider", "33 is not divisible by 2", "ffn_hidden_size"]],
    ),
    "an argument that TransformerConfig does not take": (
        Own,
        ({"num_layer": 2},),
        {},
        [["the provider Own.provider", "unexpected keyword argument 'num_layer'"]],
    ),
    "one chunk": (Own, (), {PP: 2, VPP: 1}, [[f"{VPP}=1", "use 2 or more, or leave it out"]]),
    "compiled": (Own, ({}, _compile), {}, [["torch.compile of 'model'", "leave torch.compile out"]]),
    "compiled layer": (Own, ({}, _compile_layer), {}, [["torch.compile of 'model.chunks.0.decoder.layers.0'"]]),
    "two models": (Own, ({}, _second), {PP: 2}, [["regions ['model', 'reference']", f"{PP}=2", f"use {PP}=1"]]),
    "fields of another layout, and manual optimization": (
        Own,
        (
            {"calculate_per_token_loss": False, "deallocate_pipeline_outputs": True, "variable_seq_lengths": False},
            _manual,
        ),
        {PP: 2},
        [
            ["manual optimization"],
            ["calculate_per_token_loss"],
            ["variable_seq_lengths"],
            ["deallocate_pipeline_outputs"],
        ],
    ),
    "sequence parallel by the config alone": (
        Own,
        ({"sequence_parallel": True},),
        {TP: 2},
        [["sequence_parallel=True in the config of 'model'", "sequence_parallel=False in the strategy"]],
    ),
    "fields of MegatronGPT": (
        MegatronGPT,
        ({**runs.DENSE, "num_layers": 5, TP: 1, "hiden_dropout": 0.0}, 18),
        {PP: 2},
        [["hiden_dropout=0.0 in config", "did you mean hidden_dropout?"], ["num_layers=5"]],
    ),
    "what Megatron-Core finds itself": (
        MegatronGPT,
        ({**runs.DENSE, "recompute_granularity": "full"}, 18),
        {},
        [["config", "refuses it", "recompute_method"]],
    ),
}
"""Module, its arguments, the strategy's, and words of each problem in the order of the error."""


@patch.object(Watchdog, "report")  # every rank refuses, so that the first need not wait until the others have read it
def refusals(names: list[str], report: Any) -> dict[str, list[str]]:
    """The problems that each module of these is refused for."""
    found: dict[str, list[str]] = {}
    for name in names:
        make, args, strategy, _ = MODULES[name]
        run, found[name] = trainer(strategy=strategy), []
        try:
            run.fit(make(*args), loader((5, 3), 2, "packed"))
        except ConfigurationError as error:
            found[name] = [str(problem) for problem in error.problems]
    return found


def test_modules_that_do_not_run_are_refused_on_every_rank(ranks: RankPool) -> None:
    for outcome in ranks.run(refusals, 2, list(MODULES)):
        for name, (_, _, _, problems) in MODULES.items():
            assert len(outcome[name]) == len(problems), outcome[name]
            for text, words in zip(outcome[name], problems, strict=True):
                for word in words:
                    assert word in text, name


def broken_provider() -> str:
    """What a run says of a provider that fails by itself."""

    class Broken(Own):
        def provider(self, *args: Any, **kwargs: Any) -> nn.Module:
            raise ValueError("no model today")

    try:
        trainer(strategy={}).fit(Broken(), loader((5, 3), 2, "packed"))
    except ValueError as error:
        return str(error)
    return "nothing"


def test_what_a_provider_raises_itself_stays_as_it_is(ranks: RankPool) -> None:
    assert ranks.run(broken_provider, 1) == ["no model today"]


@patch.object(Watchdog, "report")
def strange_tokens(report: Any) -> list[str]:
    """What tokens and labels are refused with that the vocabulary does not have, with and without tensor parallelism."""
    said = []
    for field, value, sizes in (
        ("input_ids", runs.VOCABULARY, {TP: 2}),
        ("labels", runs.VOCABULARY + 3, {TP: 2}),
        ("input_ids", -1, {}),
        ("input_ids", runs.VOCABULARY - 1, {TP: 2}),
    ):
        data = loader((5, 3), 2, "packed")
        for sample in data.dataset.samples:  # type: ignore[attr-defined]
            sample[field] = sample[field].index_fill(0, torch.tensor([2]), value)
        try:
            trainer(strategy=sizes).fit(runs.SmallGPT(runs.DENSE, logits=False), data)
            said.append("")
        except BatchError as error:
            said.append(str(error))
    return said


def test_tokens_outside_the_vocabulary_are_refused(ranks: RankPool) -> None:
    for above, label, below, last in ranks.run(strange_tokens, 2):
        assert f"input_ids with the id {runs.VOCABULARY}" in above and f"vocab_size={runs.VOCABULARY}" in above
        assert f"labels with the id {runs.VOCABULARY + 3}" in label and "tokenizer" in label
        assert "the id -1" in below
        assert last == ""


def refused_calls() -> dict[str, str]:
    """What calls of a model are refused with, in and outside steps."""
    said: dict[str, str] = {}

    def ask(name: str, call: Any) -> None:
        try:
            call()
        except RegionError as error:
            said[name] = str(error)

    tokens = torch.arange(6).view(2, 3)
    masks = {"left": [[0, 1, 1], [1, 1, 1]], "right": [[1, 1, 0], [1, 1, 1]]}

    class Calling(runs.SmallGPT):
        def on_train_start(self) -> None:
            for name in REFUSED_ARGUMENTS:
                ask(name, partial(self.model, input_ids=tokens, **{name: object()}))
                ask(f"no {name}", partial(self.model, input_ids=tokens, **{name: None}))
            for name, mask in masks.items():
                ask(name, partial(self.model, input_ids=tokens, attention_mask=torch.tensor(mask)))
            ask("4-d", partial(self.model, input_ids=tokens, attention_mask=torch.ones(1, 1, 3, 3).tril() < 0.5))

    for kind in ("rope", "learned_absolute", "none"):
        options = {"position_embedding_type": kind, "max_sequence_length": 5}
        for length in (5, 6):
            run, module = trainer(strategy={}), Calling(runs.DENSE, **options)
            ask(f"{kind} {length}", partial(run.fit, module, loader((length, 3), 2, "padded")))
    return said


def test_calls_that_would_be_wrong_are_refused(ranks: RankPool) -> None:
    [said] = ranks.run(refused_calls, 1)
    assert set(said) == {*REFUSED_ARGUMENTS, "left", "rope 6", "learned_absolute 6"}
    for name in REFUSED_ARGUMENTS:
        assert f"was called with {name}. Leave it out" in said[name]
    assert "Pad on the right" in said["left"]
    assert "position 5" in said["rope 6"] and "max_sequence_length=5" in said["learned_absolute 6"]


def engine_options() -> list[str]:
    """What is said of attention options to a model of Transformer Engine's layers: refused, and in force."""
    compat.load()  # Megatron-Core looks for Transformer Engine when it is imported
    said, tiny = [], GivenPlan(1, [(0, 1, [0, 1])])
    with transformer_engine():
        for options in ({"attention_kernel": "reference"}, {"links": "cost_model"}, {}):
            run = trainer(strategy={"scheduler": tiny, **options})
            try:
                run.fit(runs.SmallGPT(runs.DENSE), loader((5, 3), 2, "packed"))
                said.append(run.strategy.describe())
            except ConfigurationError as error:
                said += [str(problem) for problem in error.problems]
    return said


def test_attention_of_transformer_engine_has_no_kernel_and_no_scheme_to_choose(ranks: RankPool) -> None:
    [[kernel, links, described]] = ranks.run(engine_options, 1)
    assert "attention_kernel='reference'" in kernel and "leave attention_kernel out" in kernel
    assert "links='cost_model'" in links and "Transformer Engine's attention" in links
    assert "attention of model by ring, in Transformer Engine's kernels" in described
    assert "scheme chosen" not in described


@pytest.mark.parametrize("part", [ContextParallelCoreAttention, TorchNorm])
def test_arguments_that_a_later_release_gives_our_parts_are_refused(part: Any) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'later'"):
        part(SimpleNamespace(), 1, later=1)


def test_norms_of_other_kinds_are_refused() -> None:
    with pytest.raises(ValueError, match="normalization='L2Norm'"):
        TorchNorm(SimpleNamespace(normalization="L2Norm"), 8)


@patch.object(Watchdog, "report")
def uneven_plans(report: Any) -> list[str]:
    """What a plan is refused with that leaves the second rank of the plane without a pack once, by layout."""
    said = []
    experts = {"expert_tensor_parallel_size": 2}
    for sizes, config in (({PP: 2}, runs.DENSE), ({EP: 2}, runs.MOE), (experts, runs.MOE)):
        strategy = {**sizes, "scheduler": GivenPlan(4 // sizes.get(PP, 1), [(0, 1, [0]), (1, 1, [1]), (0, 1, [2])])}
        run = trainer(strategy=strategy)
        try:
            run.fit(runs.SmallGPT(config), loader((5, 3, 4), 3, "packed"))
        except PlanError as error:
            said.append(str(error))
    return said


def test_plans_that_leave_ranks_out_are_refused_where_ranks_meet(ranks: RankPool) -> None:
    for pipeline, experts, shared in ranks.run(uneven_plans, 4):
        assert "packs for 2 of 2 ranks" not in pipeline
        assert "micro-batch 1 of the plan has packs for 1 of 2 ranks" in pipeline
        assert "the ranks run [2, 1] packs (scheduled by GivenPlan)" in pipeline
        assert "packs for 2 of 4 ranks" in experts
        assert "use scheduler='dynamic'" in experts
        assert "expert_tensor_parallel_size=2" in shared
