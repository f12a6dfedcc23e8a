"""Metrics of steadiness: small runs worked out by hand; and over ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from lightning_dcp.errors import ConfigurationError
from lightning_dcp.metrics import EffectiveThroughput, HotSpot, HotSpots, PeakMemory, StepTimeWindow, TimeSplit
from lightning_dcp.step.metric_state import StateSync
from tests.support.ranks import RankPool


def values(metric: Any) -> dict[str, float]:
    return {name: float(value) for name, value in metric.compute().items()}


def test_quantiles_are_of_the_window_alone() -> None:
    metric = StepTimeWindow(window=101)
    for seconds in [1000.0] * 50 + [1.0 + n for n in range(101)]:
        metric.update(seconds)
    assert values(metric) == pytest.approx({"p50": 51.0, "p99": 100.0, "p99_over_p50": 100 / 51})
    metric.reset()
    assert all(math.isnan(value) for value in values(metric).values())


def test_the_ratio_is_of_the_outermost_quantiles() -> None:
    metric = StepTimeWindow(2000, (0.9, 0.5, 0.999))
    for seconds in range(1, 1002):
        metric.update(float(seconds))
    assert values(metric) == pytest.approx({"p90": 901.0, "p50": 501.0, "p99.9": 1000.0, "p99.9_over_p50": 1000 / 501})
    alone = StepTimeWindow(quantiles=(0.5,))
    alone.update(2.0)
    assert values(alone) == {"p50": 2.0}


def test_effective_throughput() -> None:
    """Nine steps of 1 s and one of 3 s: the median step would give 10 s for what took 12 s."""
    metric = EffectiveThroughput()
    for seconds in [1.0] * 9 + [3.0]:
        metric.update(60, seconds)
    assert values(metric) == pytest.approx({"tokens_per_second": 50.0, "steadiness": 10 / 12}, rel=1e-12)


def test_steadiness_is_one_at_most() -> None:
    """One step of ten far quicker than the others: the mean is below the median."""
    metric = EffectiveThroughput()
    for seconds in [1.0] * 9 + [0.1]:
        metric.update(60, seconds)
    assert values(metric)["steadiness"] == 1.0


def test_throughput_over_the_window() -> None:
    metric = EffectiveThroughput(window=2)
    for tokens, seconds in [(1000, 9.0), (10, 1.0), (20, 2.0)]:
        metric.update(tokens, seconds)
    assert values(metric) == pytest.approx({"tokens_per_second": 10.0, "steadiness": 1.0})
    metric.reset()
    assert values(metric) == {"tokens_per_second": 0.0, "steadiness": 0.0}


def test_the_split_of_the_ranks_time() -> None:
    """Rank 0 computes 6 of 8 s and receives 1 s; rank 1 computes 3 s, receives 1 s and is idle for the rest."""
    metric = TimeSplit(2)
    for _ in range(2):
        metric.update({0: (3.0, 0.5), 1: (1.5, 0.5)}, 4.0)
    expected = torch.tensor([[0.75, 0.125, 0.125], [0.375, 0.5, 0.125]], dtype=torch.float64)
    torch.testing.assert_close(metric.shares(), expected)
    assert values(metric) == pytest.approx(
        {
            "busy": 0.5625,
            "wait": 0.3125,
            "transfer": 0.125,
            "busy_worst": 0.375,
            "wait_worst": 0.5,
            "transfer_worst": 0.125,
        }
    )
    metric.reset()
    assert set(values(metric).values()) == {0.0}


def test_peak_memory() -> None:
    metric = PeakMemory(3)
    for rank, num_bytes in [(0, 5), (2, 9), (0, 4), (2, 10)]:
        metric.update(rank, num_bytes)
    assert metric.compute().tolist() == [5, 0, 10]


def test_hot_spots_add_up_by_name() -> None:
    metric = HotSpots(top_k=2)
    metric.update(4, {7: 1.0, "chat-a": 0.5})
    metric.update(9, {"chat-a": 2.0, 8: 0.25})
    assert metric.compute() == (HotSpot("chat-a", 2.5, 2, 9), HotSpot(7, 1.0, 1, 4))


def test_names_that_look_alike_are_told_apart_and_odd_ones_become_text() -> None:
    metric = HotSpots(top_k=3)
    metric.update(1, {"7": 1.0, 7: 2.0, (1, "ü"): 3.0})
    assert [spot.name for spot in metric.compute()] == ["(1, 'ü')", 7, "7"]


def test_of_many_names_the_hottest_are_kept() -> None:
    metric = HotSpots(top_k=1)
    for step in range(200):
        metric.update(step, {f"cool {step}": 0.01, "hot": 0.05})
    assert metric.compute() == (HotSpot("hot", pytest.approx(10.0), 200, 199),)
    assert len(metric.names) <= 33


def over_ranks() -> dict[str, Any]:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    times, throughput, split, memory = StepTimeWindow(2, (0, 1)), EffectiveThroughput(2), TimeSplit(2), PeakMemory(2)
    spots = HotSpots(2)
    for step in range(3):
        times.update(1.0 + step + 10 * rank)
        throughput.update(100 * rank, 1.0 + step)
        split.update({rank: (1.0 + rank, 0.0)}, 2.0)
        memory.update(rank, 100 * (rank + 1))
    spots.update(1, {"both": 1.0} if rank else {"both": 1.0, "one": 3.0})
    StateSync.install(spots, dist.group.WORLD)
    return {
        "times": values(times),
        "throughput": values(throughput),
        "split": values(split),
        "memory": memory.compute().tolist(),
        "spots": spots.compute(),
    }


def test_over_ranks(ranks: RankPool) -> None:
    for found in ranks.run(over_ranks, 2):
        assert found["times"] == pytest.approx({"p0": 2.0, "p100": 13.0, "p100_over_p0": 6.5})
        assert found["throughput"] == pytest.approx({"tokens_per_second": 40.0, "steadiness": 1.0})
        assert found["split"]["busy"] == pytest.approx(0.75)
        assert found["split"]["wait_worst"] == pytest.approx(0.5)
        assert found["memory"] == [100, 200]
        assert found["spots"] == (HotSpot("one", 3.0, 1, 1), HotSpot("both", 2.0, 2, 1))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: StepTimeWindow(0), "window=0"),
        (lambda: StepTimeWindow(True), "window=True"),
        (lambda: StepTimeWindow(quantiles=()), r"quantiles=\[\]"),
        (lambda: StepTimeWindow().update(-1.0), "seconds=-1"),
        (lambda: EffectiveThroughput(-3), "window=-3"),
        (lambda: EffectiveThroughput().update(1, math.nan), "seconds=nan"),
        (lambda: TimeSplit(0), "ranks=0"),
        (lambda: TimeSplit(2).update({2: (1.0, 1.0)}, 1.0), r"rank=2(.|\n)*a plane of 2"),
        (lambda: TimeSplit(2).update({0: (-1.0, 1.0)}, 1.0), "busy=-1"),
        (lambda: PeakMemory(2).update(-1, 5), "rank=-1"),
        (lambda: HotSpots(0), "top_k=0"),
        (lambda: HotSpots().update(1, {"a": -1.0}), r"seconds\['a'\]=-1"),
    ],
)
def test_what_cannot_be_is_refused(wrong: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        wrong()
