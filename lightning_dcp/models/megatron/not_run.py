"""Fields of a TransformerConfig that are refused, each with the reason and what to do."""

from __future__ import annotations

_LEAVE = "leave it out"
_GRAPHS = ("graphs of fixed shapes, and micro-batches of many lengths and CP sizes", _LEAVE)
_OFFLOAD = ("offloading that looks for a micro-batch's activations in the order of one static group", _LEAVE)
_LOSS = "the strategy, which scales losses and sums gradients itself"
_MAIN_GRAD = ("gradients in `main_grad` buffers, of which the strategy has none", _LEAVE)
_LOGITS = ("an attention that does not hand out its largest scores", _LEAVE)

NOT_RUN: dict[str, tuple[str, str]] = {
    "attention_dropout": (
        "attention whose scores lie on other ranks for each CP size, so that dropout would depend on the plan",
        "use attention_dropout=0.0; hidden_dropout works",
    ),
    "multi_latent_attention": (
        "attention that takes its rotary angles from the static CP group, not from the micro-batch's",
        "use a model with grouped-query attention",
    ),
    "experimental_attention_variant": (
        "a layer that mixes tokens in its own way; only attention runs over CP groups",
        "use layers with softmax attention only",
    ),
    "is_hybrid_model": ("recurrent layers; only attention runs over CP groups", "use layers with attention only"),
    "mrope_section": ("one position a token; multimodal rotary angles need three", "use rope"),
    "mtp_num_layers": (
        "tokens shifted across the borders of samples and of CP shards",
        "leave multi-token prediction out",
    ),
    "heterogeneous_block_specs": ("layers made from a file, without the attention of this package", _LEAVE),
    "qk_l2_norm": ("a layer spec without it", "use qk_layernorm"),
    "qk_clip": _LOGITS,
    "log_max_attention_logit": _LOGITS,
    "use_kitchen_attention": ("the attention of this package in its place", _LEAVE),
    "flash_decode": ("a run that trains; it is for inference", _LEAVE),
    "enable_cuda_graph": _GRAPHS,
    "external_cuda_graph": _GRAPHS,
    "cuda_graph_impl": _GRAPHS,
    "cpu_offloading": _OFFLOAD,
    "fine_grained_activation_offloading": _OFFLOAD,
    "hybrid_context_parallel": ("the strategy, which chooses CP sizes itself", _LEAVE),
    "hierarchical_context_parallel_sizes": ("CP groups that change from micro-batch to micro-batch", _LEAVE),
    "tp_comm_overlap": ("buffers of one fixed size, and micro-batches of many lengths", _LEAVE),
    "use_ring_exchange_p2p": ("a torch without ring exchange: none that is released has it", _LEAVE),
    "gradient_accumulation_fusion": _MAIN_GRAD,
    "defer_embedding_wgrad_compute": _MAIN_GRAD,
    "delay_wgrad_compute": ("a schedule of its own, which calls the model past training_step", _LEAVE),
    "deallocate_pipeline_outputs": ("hidden states that the strategy still needs for the backward", _LEAVE),
    "num_microbatches_with_partial_activation_checkpoints": (
        "a step that does not know which micro-batches to recompute",
        "use recompute_granularity for all of them",
    ),
    "grad_scale_func": (_LOSS, _LEAVE),
    "no_sync_func": (_LOSS, _LEAVE),
    "grad_sync_func": (_LOSS, _LEAVE),
    "param_sync_func": (_LOSS, _LEAVE),
    "finalize_model_grads_func": (_LOSS, _LEAVE),
}
"""What does not run under :class:`~lightning_dcp.DCPStrategy`: field to (what was found, what to do). Fields of all releases."""

WITH_TRANSFORMER_ENGINE = (
    "fp8",
    "fp4",
    "layernorm_zero_centered_gamma",
    "apply_rope_fusion",
    "fused_single_qkv_rope",
    "use_te_activation_func",
    "fused_residual_rmsnorm",
)
"""What only Transformer Engine's layers do. Its fused rotary kernel takes one angle a token, as regions have them."""
