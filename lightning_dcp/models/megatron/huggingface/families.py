"""The architectures that can be read and written, and what their configs leave unsaid."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Experts:
    """Names of a mixture of experts inside a layer.

    Attributes:
        router: module of the router.
        experts: module list of the experts.
        gate: projection whose output is activated.
        up: projection that is multiplied with it.
        down: projection back.
    """

    router: str
    experts: str
    gate: str
    up: str
    down: str


@dataclass(frozen=True)
class Family:
    """One architecture.

    Attributes:
        architecture: its class in transformers.
        model_type: its name in ``config.json``.
        qkv_bias: whether queries, keys and values have biases; None if ``attention_bias`` says so, which then goes for
            the output projection, too.
        mlp_bias: whether ``mlp_bias`` is looked at.
        qk_norm: whether queries and keys are normalised head by head.
        window: whose ``sliding_window`` counts: ``none``, ``all`` layers if it is set, ``switched`` the same under
            ``use_sliding_window``, ``layers`` those of ``layer_types`` (or from ``max_window_layers`` on) under it.
        experts: names of the experts; None for a dense model.
        theta: base of the rotary frequencies where the config says nothing.
        epsilon: of the norms, where the config says nothing.
    """

    architecture: str
    model_type: str
    qkv_bias: bool | None = False
    mlp_bias: bool = False
    qk_norm: bool = False
    window: str = "none"
    experts: Experts | None = None
    theta: float = 10_000.0
    epsilon: float = 1e-6


_QWEN = Experts("mlp.gate", "mlp.experts", "gate_proj", "up_proj", "down_proj")
_MIXTRAL = Experts("block_sparse_moe.gate", "block_sparse_moe.experts", "w1", "w3", "w2")

FAMILIES = {
    family.architecture: family
    for family in (
        Family("LlamaForCausalLM", "llama", qkv_bias=None, mlp_bias=True),
        Family("MistralForCausalLM", "mistral", window="all"),
        Family("Qwen2ForCausalLM", "qwen2", qkv_bias=True, window="layers"),
        Family("Qwen3ForCausalLM", "qwen3", qkv_bias=None, qk_norm=True, window="layers"),
        Family("MixtralForCausalLM", "mixtral", window="all", experts=_MIXTRAL, theta=1e6, epsilon=1e-5),
        Family("Qwen3MoeForCausalLM", "qwen3_moe", qkv_bias=None, qk_norm=True, window="switched", experts=_QWEN),
    )
}
"""By class name in transformers."""
