"""Layer specs of Megatron-Core with our parts in them: core attention, norms, the router."""

from __future__ import annotations

import importlib.util
from typing import Any, Literal

from lightning_dcp.models.megatron.compat import submodules_of
from lightning_dcp.models.megatron.core_attention import ContextParallelCoreAttention
from lightning_dcp.models.megatron.norm import TorchNorm
from lightning_dcp.models.megatron.router import context_parallel_router

Backend = Literal["auto", "local", "transformer_engine"]
"""What layers are made of: Megatron-Core's own, or Transformer Engine's; ``auto``: the latter on a GPU where installed."""


def has_transformer_engine() -> bool:
    """Whether Transformer Engine is installed."""
    return importlib.util.find_spec("transformer_engine") is not None


def layer_spec(config: Any, backend: Backend = "auto", *, on_gpu: bool = False, vp_stage: int | None = None) -> Any:
    """The layers of a GPT model that runs under :class:`~lightning_dcp.DCPStrategy`.

    Args:
        config: the model's TransformerConfig.
        backend: what the layers are made of.
        on_gpu: whether the model will lie on a GPU.
        vp_stage: the chunk that the spec is for, where layers differ and a stage has several chunks.

    Returns:
        The ``TransformerBlockSubmodules`` of this stage: its layers (those of mixtures of experts among them, by
        ``moe_layer_freq``), and the norm behind the last.

    Raises:
        ModuleNotFoundError: Transformer Engine is asked for and not installed.
    """
    use_te = backend == "transformer_engine" or (backend == "auto" and on_gpu and has_transformer_engine())
    if use_te and not has_transformer_engine():
        raise ModuleNotFoundError(
            "backend='transformer_engine', but Transformer Engine is not installed: pip install 'lightning-dcp[gpu]', or "
            "use backend='local'"
        )
    from megatron.core.models.gpt import gpt_layer_specs

    spec = gpt_layer_specs.get_gpt_decoder_block_spec(
        config, use_transformer_engine=use_te, normalization=config.normalization, vp_stage=vp_stage
    )
    for layer in spec.layer_specs:
        _put_ours(layer, use_te)
    if not use_te:
        spec.layer_norm = TorchNorm
    return spec


def _put_ours(spec: Any, use_te: bool) -> None:
    """Put our parts into a layer's spec, in place of Megatron-Core's."""
    from megatron.core.transformer.identity_op import IdentityOp

    layer, attention = spec.submodules, spec.submodules.self_attention.submodules
    if use_te:
        from lightning_dcp.models.megatron.te_attention import te_core_attention

        attention.core_attention = te_core_attention()
    else:
        attention.core_attention = ContextParallelCoreAttention
        for owner, names in (
            (layer, ("input_layernorm", "pre_mlp_layernorm")),
            (attention, ("q_layernorm", "k_layernorm")),
        ):
            for name in names:
                if getattr(owner, name) not in (IdentityOp, None):
                    setattr(owner, name, TorchNorm)
    experts = submodules_of(layer.mlp)
    if hasattr(experts, "router"):
        experts.router = context_parallel_router()
