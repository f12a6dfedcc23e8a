"""Cost models of known hardware, for any decoder-only transformer."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_dcp.errors import ConfigurationError, Problem, raise_problems
from lightning_dcp.schedule.cost import CostModel

Table = tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Hardware:
    """What one rank achieves, not what its data sheet promises.

    Attributes:
        matmul_flops: FLOP/s of large matrix products in bf16 (CPU: float32).
        attention_flops: FLOP/s of causal attention, forward and backward, on long sequences.
        efficiency: share of that speed by a sample's tokens on one rank.
        layer_overhead: seconds a layer and pack, forward and backward, that do not depend on length.
        link_latency: seconds of one exchange inside a node.
        bandwidth: bytes/s to a neighbour inside a node.
        internode_latency: seconds of one exchange between nodes.
        internode_bandwidth: bytes/s to a neighbour in another node.
        overlap: share of compute behind which a transfer disappears.
        number_bytes: bytes of one number that is sent.
    """

    matmul_flops: float
    attention_flops: float
    efficiency: Table
    layer_overhead: float
    link_latency: float
    bandwidth: float
    internode_latency: float
    internode_bandwidth: float
    overlap: float
    number_bytes: int = 2


# Speed of an attention kernel on one of eight shards of a sample, all keys local, against that of the longest: H100,
# 64 query heads, 4 key heads, head size 128 (published for samples of 256 to 64K tokens; here by shard).
_FLASH_EFFICIENCY: Table = (
    (32, 0.17),
    (64, 0.22),
    (128, 0.28),
    (256, 0.40),
    (512, 0.52),
    (1024, 0.68),
    (2048, 0.80),
    (4096, 0.90),
    (8192, 1.0),
)

HARDWARE: dict[str, Hardware] = {
    "a100": Hardware(
        # FlexSP (ASPLOS'25) fits 0.18396 ms a token for a 7B model: 4.0e10 FLOP a token (below) in that time.
        matmul_flops=2.16e14,
        # The same fit: 5.128e-6 ms a token^2, with 9.2e5 FLOP a token^2.
        attention_flops=1.79e14,
        efficiency=_FLASH_EFFICIENCY,  # measured on H100; no such table was found for A100
        layer_overhead=2e-4,  # assumption: 40 kernels a layer, 5 us each to launch
        link_latency=1.5e-5,  # assumption: a send and receive of NCCL inside a node
        bandwidth=1.21e11,  # FlexSP: all-to-all of 8 GPUs in a node
        internode_latency=3e-5,  # assumption: the same over InfiniBand
        internode_bandwidth=8.7e9,  # FlexSP: all-to-all of 16 GPUs in two nodes
        overlap=0.8,  # ring-flash-attention's zigzag ring keeps 90 % of the ideal speed where both take about as long
    ),
    "h100": Hardware(
        matmul_flops=5.4e14,  # 55 % of the data sheet's 989 TFLOP/s; Megatron reports 41 to 48 % for whole models
        attention_flops=5.4e14,  # FlashAttention-3, head size 128, causal: 640 TFLOP/s forward, about 510 backward
        efficiency=_FLASH_EFFICIENCY,
        layer_overhead=2e-4,  # assumption, as above
        link_latency=1.5e-5,  # assumption, as above
        bandwidth=3.6e11,  # 80 % of NVLink 4's 450 GB/s each way
        internode_latency=3e-5,  # assumption, as above
        internode_bandwidth=4e10,  # 80 % of one 400 Gbit/s adapter a GPU
        overlap=0.8,  # as above
    ),
    "h200": Hardware(
        matmul_flops=5.4e14,  # the H100's processor: same data-sheet peak
        attention_flops=5.4e14,  # bound by compute, not by the faster memory
        efficiency=_FLASH_EFFICIENCY,  # as for the H100
        layer_overhead=2e-4,  # as above
        link_latency=1.5e-5,  # as above
        bandwidth=3.6e11,  # NVLink 4, as above
        internode_latency=3e-5,  # as above
        internode_bandwidth=4e10,  # as above
        overlap=0.8,  # as above
    ),
    "cpu": Hardware(
        # All from `lightning-dcp calibrate --config configs/demo_cpu.yaml` (1.06 million parameters, 8 layers, float32):
        # four ranks on two cores of a cloud machine, so half a core a rank, and gloo over the loopback device.
        matmul_flops=1.7e10,
        attention_flops=1.7e10,
        efficiency=((8, 0.014), (16, 0.051), (32, 0.16), (64, 0.37), (128, 0.57), (256, 0.7), (512, 0.73), (1024, 1.0)),
        layer_overhead=8.7e-3,
        link_latency=4.9e-3,
        bandwidth=5.5e8,
        internode_latency=1e-2,  # assumption: no second machine was at hand
        internode_bandwidth=1e8,  # assumption: Gigabit Ethernet
        overlap=0.0,  # transfers and compute share the core
        number_bytes=4,
    ),
}


def from_transformer_config(
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    ffn: int,
    vocab: int,
    *,
    hardware: str = "h100",
    head_size: int | None = None,
    gated: bool = True,
    active_experts: int = 1,
    recompute: bool = False,
    tensor_model_parallel_size: int = 1,
    ranks_per_node: int | None = None,
) -> CostModel:
    """The cost model of a decoder-only transformer, by counting its FLOPs.

    A product of a token with a matrix of n weights takes 2 n FLOP forward and twice that backward. Causal attention over
    L tokens takes two products of L^2 / 2 pairs forward and five backward: 7 x heads x head_size x L^2 FLOP a layer.
    A hop carries keys and values forward, and both with their gradients backward.

    Args:
        layers: decoder layers.
        hidden: width of the residual stream.
        heads: query heads.
        kv_heads: key and value heads.
        ffn: inner width of the MLP (of one expert).
        vocab: size of the vocabulary.
        hardware: one of :data:`HARDWARE`.
        head_size: width of a head, by default ``hidden / heads``.
        gated: whether the MLP has three matrices (SwiGLU) rather than two.
        active_experts: experts that each token goes through.
        recompute: whether the forward pass is done again in backward (activation checkpointing).
        tensor_model_parallel_size: ranks that share each layer's work; the plane's ranks are then these groups.
        ranks_per_node: ranks of the plane in one node.

    Raises:
        ConfigurationError: a size that is not positive, heads that do not divide, an unknown hardware.
    """
    sizes = {
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": kv_heads,
        "ffn": ffn,
        "vocab": vocab,
        "head_size": 1 if head_size is None else head_size,
        "active_experts": active_experts,
        "tensor_model_parallel_size": tensor_model_parallel_size,
    }
    raise_problems(_size_problems(sizes) or _head_problems(hidden, heads, kv_heads, head_size))
    machine = hardware_of(hardware)
    width = head_size or hidden // heads
    projections = hidden * width * (2 * heads + 2 * kv_heads)
    mlp = (3 if gated else 2) * hidden * ffn * active_experts
    weights = layers * (projections + mlp) + hidden * vocab
    passes = 4 if recompute else 3  # in units of one forward pass
    attention_passes = 9 if recompute else 7  # in products of L^2 / 2 pairs
    exchanges = passes * 2 * kv_heads * width * machine.number_bytes
    share = tensor_model_parallel_size
    return CostModel(
        linear=2 * passes * weights / machine.matmul_flops / share,
        attention=attention_passes * layers * heads * width / machine.attention_flops / share,
        efficiency=machine.efficiency,
        pack_overhead=layers * machine.layer_overhead,
        hop_latency=layers * (passes - 1) * machine.link_latency,
        hop_bytes=layers * exchanges / share,
        bandwidth=machine.bandwidth,
        internode_latency=layers * (passes - 1) * machine.internode_latency,
        internode_bandwidth=machine.internode_bandwidth,
        overlap=machine.overlap,
        ranks_per_node=ranks_per_node,
    )


def preset(name: str, *, ranks_per_node: int | None = None) -> CostModel:
    """The cost model of a 7B model (Llama 2: no grouped heads) on one of :data:`HARDWARE`.

    Raises:
        ConfigurationError: an unknown name.
    """
    return from_transformer_config(32, 4096, 32, 32, 11008, 32000, hardware=name, ranks_per_node=ranks_per_node)


def hardware_of(name: str) -> Hardware:
    """One of :data:`HARDWARE`, by name.

    Raises:
        ConfigurationError: an unknown name.
    """
    if name not in HARDWARE:
        raise ConfigurationError(
            [Problem(f"hardware {name!r}", "an unknown name", f"use one of {', '.join(HARDWARE)}")]
        )
    return HARDWARE[name]


def _size_problems(sizes: dict[str, int]) -> list[Problem]:
    return [
        Problem(f"{name}={value!r}", "not a positive whole number", f"give {name} of 1 or more")
        for name, value in sizes.items()
        if not isinstance(value, int) or isinstance(value, bool) or value < 1
    ]


def _head_problems(hidden: int, heads: int, kv_heads: int, head_size: int | None) -> list[Problem]:
    problems = []
    if head_size is None and hidden % heads:
        problems.append(
            Problem(f"hidden={hidden}, heads={heads}", "heads that do not divide the width", "give head_size")
        )
    if heads % kv_heads:
        problems.append(
            Problem(
                f"heads={heads}, kv_heads={kv_heads}",
                "query heads that cannot share key heads evenly",
                "use kv_heads that divide heads",
            )
        )
    return problems
