"""The numbers of small steps, worked out by hand; and over ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from lightning_dcp.errors import ConfigurationError
from lightning_dcp.metrics import PEAK_FLOPS, BusyShare, ModelFlopUtilization, PaddingShare, StepTime, TokenThroughput
from tests.support.ranks import RankPool

SIZE: dict[str, Any] = {"parameters": 1000, "layers": 2, "heads": 4, "head_size": 8, "peak_flops": 1e6}


def test_tokens_a_second() -> None:
    metric = TokenThroughput()
    metric.update(tokens=100, seconds=0.5)
    metric.update(tokens=50, seconds=1.0)
    assert float(metric.compute()) == 100.0
    metric.reset()
    metric.update(7, 2.0)
    assert float(metric.compute()) == 3.5


def test_quantiles_of_the_step_time() -> None:
    metric = StepTime(quantiles=(0, 0.5, 0.99, 0.999))
    for seconds in range(101):
        metric.update(float(seconds))
    expected = {"p0": 0.0, "p50": 50.0, "p99": 99.0, "p99.9": 99.9}
    assert {name: float(value) for name, value in metric.compute().items()} == pytest.approx(expected)


def test_busy_share() -> None:
    metric = BusyShare()
    metric.update(busy=1.0, seconds=2.0)
    metric.update(busy=2.0, seconds=2.0)
    assert float(metric.compute()) == 0.75


def test_padding_share() -> None:
    metric = PaddingShare()
    metric.update(real=10, computed=10)
    metric.update(real=20, computed=30)
    assert float(metric.compute()) == 0.25


@pytest.mark.parametrize(("causal", "attention"), [(False, 12), (True, 6)])
def test_model_flop_utilization(causal: bool, attention: int) -> None:
    metric = ModelFlopUtilization(**SIZE, causal=causal)
    metric.update([10, 30], 2.0)
    metric.update([], 1.0)
    flops = 6 * 1000 * 40 + attention * 2 * 4 * 8 * (10**2 + 30**2)
    assert float(metric.compute()) == pytest.approx(flops / (3.0 * 1e6), rel=1e-12)


def test_the_utilization_of_a_model_that_was_published() -> None:
    """PaLM 540B (arXiv 2204.02311): 238.3K tokens/s on 6144 TPU v4 of 275 TFLOP/s are 46.2 % MFU, 45.7 % without attention."""
    size: dict[str, Any] = {"parameters": 540_350_000_000, "layers": 118, "heads": 48, "head_size": 256}
    metric = ModelFlopUtilization(**size, peak_flops=6144 * 275e12)
    metric.update([2048] * 100, 2048 * 100 / 238_300)
    assert float(metric.compute()) == pytest.approx(0.462, abs=0.001)


def test_peaks_by_name() -> None:
    metric = ModelFlopUtilization(**SIZE | {"peak_flops": "h100"})
    assert metric.peak_flops == PEAK_FLOPS["h100"] == 989e12


def test_before_the_first_update() -> None:
    metrics = [TokenThroughput(), BusyShare(), PaddingShare(), ModelFlopUtilization(**SIZE)]
    assert [float(metric.compute()) for metric in metrics] == [0.0] * 4
    assert all(math.isnan(value) for value in StepTime().compute().values())


def over_ranks(idle: bool) -> dict[str, float]:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    tokens, times, busy, padding = TokenThroughput(), StepTime((0.0, 1.0)), BusyShare(), PaddingShare()
    flops = ModelFlopUtilization(**SIZE)
    lengths = [10 * (rank + 1)] if not idle or rank == 0 else []
    for _ in range(2):
        tokens.update(sum(lengths), 1.0 + rank)
        flops.update(lengths, 1.0 + rank)
        times.update(1.0 + rank)
        busy.update(1.0 + rank, 2.0)
        padding.update(sum(lengths), sum(lengths) + rank)
    values = {"tokens": tokens.compute(), "busy": busy.compute(), "padding": padding.compute(), "mfu": flops.compute()}
    return {name: float(value) for name, value in (values | times.compute()).items()}


@pytest.mark.parametrize("idle", [False, True])
def test_over_ranks(ranks: RankPool, idle: bool) -> None:
    samples = [10] if idle else [10, 20]
    flops = 2 * sum(6 * 1000 * n + 12 * 2 * 4 * 8 * n * n for n in samples)
    total = sum(samples)
    for values in ranks.run(over_ranks, 2, idle):
        assert values == pytest.approx(
            {
                "tokens": 2 * total / 4.0,
                "busy": 0.75,
                "padding": 1 - total / (total + 1),
                "mfu": flops / (4.0 * 2 * 1e6),
                "p0": 1.0,
                "p100": 2.0,
            },
            rel=1e-12,
        )


def test_states_are_kept_in_double_precision() -> None:
    """A billion tokens and one more."""
    metric = TokenThroughput()
    for _ in range(1000):
        metric.update(1_000_000_001, 1.0)
    assert metric.tokens.dtype == torch.float64
    assert float(metric.tokens) == 1_000_000_001_000


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: TokenThroughput().update(-1, 1.0), "tokens=-1"),
        (lambda: TokenThroughput().update(1, math.nan), "seconds=nan"),
        (lambda: StepTime().update(-0.5), "seconds=-0.5"),
        (lambda: StepTime(()), r"quantiles=\[\]"),
        (lambda: StepTime((0.5, 99)), r"quantiles=\[0.5, 99\]"),
        (lambda: BusyShare().update(-1.0, 1.0), "busy=-1"),
        (lambda: PaddingShare().update(10, 9), "10 real tokens"),
        (lambda: ModelFlopUtilization(**SIZE).update([3, -2], 1.0), "shortest=-2"),
        (lambda: ModelFlopUtilization(**SIZE | {"layers": 0, "peak_flops": -1.0}), r"layers=0(.|\n)*peak_flops=-1"),
        (lambda: ModelFlopUtilization(**SIZE | {"peak_flops": "abacus"}), "use one of a100, h100, h200"),
    ],
)
def test_what_cannot_be_is_refused(wrong: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        wrong()
