"""Cost models of transformers, against FLOPs and bytes counted matrix by matrix."""

import inspect
import math

import pytest

from lightning_dcp.errors import ConfigurationError
from lightning_dcp.schedule import HARDWARE, from_transformer_config, preset

SMALL = {"layers": 3, "hidden": 48, "heads": 6, "kv_heads": 2, "ffn": 40, "vocab": 100}
EVERY = pytest.mark.parametrize("hardware", HARDWARE)


def forward_flops(tokens, layers, hidden, heads, kv_heads, ffn, vocab, head_size, matrices, experts):
    """FLOP of one forward pass without attention, product by product: 2 x rows x inner x columns."""

    def product(inner, columns):
        return 2 * tokens * inner * columns

    attention = product(hidden, heads * head_size) + 2 * product(hidden, kv_heads * head_size)
    attention += product(heads * head_size, hidden)
    mlp = experts * ((matrices - 1) * product(hidden, ffn) + product(ffn, hidden))
    return layers * (attention + mlp) + product(hidden, vocab)


def attention_flops(tokens, layers, heads, head_size, products):
    """Causal attention: half of all pairs, each of which takes head_size multiplications and additions a product."""
    return layers * heads * products * (tokens**2 / 2) * 2 * head_size


CONFIGS = {
    "plain": ({}, 8, 3, 1),
    "two matrices": ({"gated": False}, 8, 2, 1),
    "wide heads": ({"head_size": 20}, 20, 3, 1),
    "experts": ({"active_experts": 4}, 8, 3, 4),
}


@EVERY
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("tp", [1, 2, 8])
def test_seconds_are_flops_over_speed(hardware, name, recompute, tp):
    options, head_size, matrices, experts = CONFIGS[name]
    machine = HARDWARE[hardware]
    cost = from_transformer_config(
        **SMALL, **options, hardware=hardware, recompute=recompute, tensor_model_parallel_size=tp
    )
    forward = forward_flops(1, **SMALL, head_size=head_size, matrices=matrices, experts=experts)
    assert cost.linear == pytest.approx((4 if recompute else 3) * forward / machine.matmul_flops / tp)
    pairs = attention_flops(1000, SMALL["layers"], SMALL["heads"], head_size, 2 + 5 + (2 if recompute else 0))
    assert cost.attention * 1000**2 == pytest.approx(pairs / machine.attention_flops / tp)


@EVERY
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("tp", [1, 2])
def test_hops_carry_keys_and_values_and_their_gradients(hardware, recompute, tp):
    machine = HARDWARE[hardware]
    cost = from_transformer_config(**SMALL, hardware=hardware, recompute=recompute, tensor_model_parallel_size=tp)
    keys_and_values = 2 * SMALL["kv_heads"] * 8 * machine.number_bytes
    rings = 1 + (1 if recompute else 0)  # of keys and values alone; one more carries gradients beside them
    assert cost.hop_bytes == SMALL["layers"] * (rings + 2) * keys_and_values / tp
    assert cost.hop_latency == pytest.approx(SMALL["layers"] * (rings + 1) * machine.link_latency)
    assert cost.internode_latency == pytest.approx(SMALL["layers"] * (rings + 1) * machine.internode_latency)


@EVERY
def test_what_does_not_depend_on_the_model_is_the_hardwares(hardware):
    machine = HARDWARE[hardware]
    cost = from_transformer_config(**SMALL, hardware=hardware, ranks_per_node=4)
    assert (cost.efficiency, cost.bandwidth, cost.internode_bandwidth, cost.overlap, cost.ranks_per_node) == (
        machine.efficiency,
        machine.bandwidth,
        machine.internode_bandwidth,
        machine.overlap,
        4,
    )
    assert cost.pack_overhead == pytest.approx(SMALL["layers"] * machine.layer_overhead)


@EVERY
def test_presets_are_a_7b_model(hardware):
    cost = from_transformer_config(32, 4096, 32, 32, 11008, 32000, hardware=hardware, ranks_per_node=8)
    assert preset(hardware, ranks_per_node=8) == cost
    assert preset(hardware).ranks_per_node is None


def test_the_7b_model_has_the_flops_of_published_counts():
    """6 FLOP a token and weight, 6.6e9 weights without the embedding; FlexSP fits 0.184 ms and 5.13e-6 ms on A100."""
    a100 = preset("a100")
    assert a100.linear * HARDWARE["a100"].matmul_flops == pytest.approx(6 * 6.607e9, rel=1e-3)
    assert a100.linear == pytest.approx(1.8396e-4, rel=0.01)
    assert a100.attention == pytest.approx(5.128e-9, rel=0.01)


@EVERY
def test_hardware_is_plausible(hardware):
    machine = HARDWARE[hardware]
    numbers = [value for value in vars(machine).values() if isinstance(value, int | float)]
    assert all(math.isfinite(value) and value >= 0 for value in numbers)
    assert machine.internode_bandwidth <= machine.bandwidth
    assert machine.internode_latency >= machine.link_latency
    assert [share for _, share in machine.efficiency] == sorted(share for _, share in machine.efficiency)
    assert machine.efficiency[-1][1] == 1.0


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize("name", [*SMALL, "head_size", "active_experts", "tensor_model_parallel_size"])
@pytest.mark.parametrize("value", [0, -1, 2.0, "8", True])
def test_sizes_that_are_no_positive_whole_numbers_are_refused_by_name(name, value):
    with pytest.raises(ConfigurationError) as caught:
        from_transformer_config(**SMALL | {name: value})
    assert [problem.asked for problem in caught.value.problems] == [f"{name}={value!r}"]


def test_heads_that_do_not_divide_are_told_together():
    with pytest.raises(ConfigurationError) as caught:
        from_transformer_config(**SMALL | {"hidden": 50, "heads": 7})
    assert len(caught.value.problems) == 2
    assert "give head_size" in str(caught.value)
    assert "kv_heads that divide heads" in str(caught.value)
    with pytest.raises(ConfigurationError) as caught:
        from_transformer_config(**SMALL | {"hidden": 50, "heads": 7}, head_size=8)
    assert len(caught.value.problems) == 1


def test_unknown_hardware_is_refused_with_what_is_known():
    for make in (lambda: preset("b200"), lambda: from_transformer_config(**SMALL, hardware="b200")):
        with pytest.raises(ConfigurationError, match="'b200'") as caught:
            make()
        assert all(name in str(caught.value) for name in HARDWARE)


def test_bad_ranks_of_a_node_are_refused():
    with pytest.raises(ConfigurationError, match="ranks_per_node=0"):
        preset("h100", ranks_per_node=0)


def test_every_option_of_a_model_changes_its_costs():
    """None is read and ignored."""
    options = inspect.signature(from_transformer_config).parameters
    other = {
        "layers": 4,
        "hidden": 96,
        "heads": 4,
        "kv_heads": 1,
        "ffn": 41,
        "vocab": 101,
        "hardware": "a100",
        "head_size": 9,
        "gated": False,
        "active_experts": 2,
        "recompute": True,
        "tensor_model_parallel_size": 2,
        "ranks_per_node": 8,
    }
    assert set(other) == set(options)
    plain = from_transformer_config(**SMALL)
    for name, value in other.items():
        assert from_transformer_config(**SMALL | {name: value}) != plain, name
